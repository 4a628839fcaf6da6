"""The scenarios around snapshots, small, on real file systems: blogs, a snapshot's operations, many retained ones."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from snapmgr.api import StorageError
from snapmgr.bench.load.blogengine import BLOG_BYTES
from snapmgr.bench.scenarios import aging, blog, snapshot_ops
from snapmgr.bench.storage.rawsnapshot import raw_ways
from support.bench.device import bench_device
from support.bench.plain import PlainBench, completed
from support.processes import children
from support.storage import loop_filesystem

_MIB = 1 << 20
# Small ones; each test has a file system of its own.
_BLOG = {"writers": 1, "rewriters": 1, "commenters": 1, "readers": 3, "interval_s": 1, "intervals": 1}
_STACKS = pytest.mark.parametrize("stack", ["btrfs", "xfs-reflink"])

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "xfs", "fio")


def _sample(scenario, stack, parameters):
    # An earlier test may have abandoned one.
    before = children()
    with bench_device() as device, device.bench(stack) as bench:
        bench.parameters = replace(parameters, memory_bytes=1 << 60)
        outcome = scenario.run(bench)
        # The blogs' one goes with the file system.
        assert len(bench.inventory()) == (scenario is blog.scenario)
        commands = [argv for argv in bench.record()["commands"] if "snapmgr.bench.load.blogengine" in argv]
        assert sum("--fill" in argv for argv in commands) == (scenario is blog.scenario)
    assert [check for check in outcome.checks if not check.ok] == []
    assert set(outcome.metrics) <= {info.name for info in scenario.metrics}
    assert children() <= before
    return outcome


@_STACKS
def test_blog(stack):
    outcome = _sample(blog.scenario, stack, completed(blog.scenario, size_bytes=2 * BLOG_BYTES, **_BLOG))
    metrics = outcome.metrics
    assert metrics["reads_after"] > 0
    # What was renamed away is the snapshot's alone now.
    assert metrics["snapshot_bytes"] > 0
    assert metrics["written_per_byte_after"] > 0
    assert "the snapshot holds what the tree held" in {check.name for check in outcome.checks}


@_STACKS
def test_operations(stack):
    parameters = completed(snapshot_ops.scenario, size_bytes=16 * _MIB, levels=(1, 3), repeats=2)
    outcome = _sample(snapshot_ops.scenario, stack, parameters)
    # Beside ours the bare call and the program, in both states.
    for operation in ("create", "call_create", "program_create", "loaded", "call_loaded", "call_delete"):
        assert outcome.axes[f"{operation}_p50"]["x"] == [1, 3]
        assert min(outcome.series[f"{operation}_p50"]) > 0
    assert {"create_over_call", "whole_over_program"} <= set(outcome.metrics)
    stopped = [note for note in outcome.notes if "the load is stopped" in note]
    assert len(stopped) == (stack == "xfs-reflink")


@_STACKS
def test_raw_snapshots_are_snapshots(stack):
    with bench_device() as device, device.bench(stack) as bench:
        folder = bench.path / "folder"
        folder.mkdir()
        (folder / "file").write_bytes(b"old" * 10000)
        bench.snapshot()
        ways = raw_ways(bench)
        assert [way.name for way in ways] == ["call", "program"]
        made = []
        for way in ways:
            assert way.create(f"raw-{way.name}") > 0
            made.append(bench.path.parent / f"raw-{way.name}")
        (folder / "file").write_bytes(b"new" * 10000)
        assert [(path / "folder" / "file").read_bytes() for path in made] == [b"old" * 10000] * 2
        # None of them is ours, and nobody's afterwards.
        assert [found.kind for found in bench.inventory()] == ["snapshot"]
        for way in ways:
            way.delete(f"raw-{way.name}")
        assert [path for path in made if path.exists()] == []


@_STACKS
def test_aging(stack):
    parameters = completed(aging.scenario, size_bytes=24 * _MIB, levels=(0, 2), churn=0.1)
    outcome = _sample(aging.scenario, stack, parameters)
    assert [check.name for check in outcome.checks][1:] == [f"snapshot {day} holds its day's data" for day in (1, 2)]
    pages = int(24 * _MIB * 0.1) // 16384
    layouts = outcome.layouts
    # Each day's pages are in new places, as long as a snapshot has the old ones.
    assert layouts["day 0"]["extents"] <= 4
    assert layouts["day 2"]["extents"] > pages
    assert outcome.axes["written_per_byte"]["x"] == [0, 1, 2]
    assert min(outcome.series["written_per_byte"]) >= 0.99
    if stack == "xfs-reflink":
        # The day between the two snapshots is the first one's alone.
        assert outcome.metrics["oldest_bytes_many"] == pages * 16384
    assert outcome.metrics["delete_s"] <= outcome.metrics["space_back_s"]


@pytest.mark.needs("ext4")
def test_full_disk_ends_the_blogs_with_a_message():
    before = children()
    with loop_filesystem("ext4", 24 * _MIB, base=Path("/dev/shm")) as disk:
        # One that says it is larger than its disk.
        bench = PlainBench(disk.point, completed(blog.scenario, size_bytes=20 * BLOG_BYTES, **_BLOG))
        with pytest.raises(StorageError, match="the disk was full") as caught:
            blog.scenario.run(bench)
    assert os.strerror(errno.ENOSPC) in caught.value.message
    assert "--size" in caught.value.hint
    assert children() <= before
