"""The published experiment 1, small: on real file systems, and on a folder whose snapshots are none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from snapmgr.api import CommandError
from snapmgr.bench.measure.directio import buffers_direct_writes
from snapmgr.bench.scenarios import random_update
from snapmgr.bench.scenarios.random_update import scenario
from snapmgr.bench.statistics.ratio import paired_ratio
from support.bench.device import bench_device
from support.bench.plain import PlainBench, completed
from support.storage import loop_filesystem

_MIB = 1 << 20

pytestmark = pytest.mark.needs("fio")


def _failed(outcome):
    return [check.name for check in outcome.checks if not check.ok]


@pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "xfs", "ext4")
@pytest.mark.parametrize("stack", ["btrfs", "xfs-reflink", "ext4"])
def test_sample_on_a_real_stack(stack):
    parameters = replace(completed(scenario, size_bytes=25_000_000), memory_bytes=1 << 60)
    with bench_device() as device, device.bench(stack) as bench:
        bench.parameters = parameters
        outcome = scenario.run(bench)
        jobs = bench.record()["jobs"]
    metrics, updates = outcome.metrics, parameters.extra["updates"]
    assert _failed(outcome) == []
    assert len(outcome.checks) == (2 if stack == "ext4" else 3)
    assert set(metrics) <= {info.name for info in scenario.metrics}
    assert {"update_none_s", "update_first_s", "update_second_s", "read_after_bytes_s", "update_cost"} <= set(metrics)
    assert metrics["update_first_written_per_byte"] >= 0.99
    assert metrics["update_first_p50_s"] <= metrics["update_first_p99_s"] <= metrics["update_first_max_s"]
    if stack == "ext4":
        # In place: the published figure of 70,576 extents cannot come from updates of such a file.
        assert metrics["extents_after"] == metrics["extents_before"]
        assert "create_s" not in metrics
        assert abs(metrics["grown_bytes"]) < _MIB
    else:
        # Random pages that became others' neighbours: less than all, far more than before.
        assert updates / 2 < metrics["extents_after"] <= 2 * updates + metrics["extents_before"]
        assert outcome.layouts["after"]["shared_bytes"] > 0
        assert metrics["create_s"] > 0
    if stack == "xfs-reflink":
        # What was overwritten is the snapshot's own now: exactly that.
        assert metrics["snapshot_bytes"] == updates * 16384
        # XFS keeps room ready around each copy (cowextsize, 128 KiB) for a while.
        assert updates * 16384 <= metrics["grown_bytes"] <= 9 * updates * 16384
    assert set(jobs) == {
        *("fill-data", "fill-control", "update-none", "update-first", "update-second", "read-before", "read-after")
    }
    assert "randseed=7" in jobs["fill-data"]


@pytest.mark.parametrize("variant", ["repaired", "printed"])
def test_buffered_variants_on_a_folder(tmp_path, variant):
    parameters = scenario.parameters(
        replace(completed(scenario), variant=variant, size_bytes=12 * _MIB, memory_bytes=_MIB, extra={})
    )
    outcome = scenario.run(bench := PlainBench(tmp_path, parameters))
    assert _failed(outcome) == []
    assert {"fill_s", "update_first_s", "read_after_buffered_s"} <= set(outcome.metrics)
    assert "update_second_s" not in outcome.metrics
    said = [" ".join(command) for command in bench.commands]
    assert any("w+b" in one for one in said) == (variant == "printed")
    size = (bench.path / "data").stat().st_size
    # The script's shared offset makes its file longer than it should be.
    assert (size > parameters.extra["data_bytes"]) == (variant == "printed")
    assert bench.snapshots == []


def test_snapshot_that_is_none_is_found_out(tmp_path):
    bench = PlainBench(tmp_path, completed(scenario, size_bytes=12 * _MIB))
    bench.shares = True
    assert _failed(scenario.run(bench)) == ["the snapshot holds the old data"]


def test_writes_that_went_nowhere_are_found_out(tmp_path):
    class _Deaf(PlainBench):
        def fio(self, name, sections):
            if name == "update-first":
                # As many I/Os, but to another file.
                sections = {**sections, "global": {**sections["global"], "filename": "elsewhere"}}
            return super().fio(name, sections)

    outcome = scenario.run(_Deaf(tmp_path, completed(scenario, size_bytes=12 * _MIB)))
    assert "the origin holds the new data" in _failed(outcome)


def test_storage_that_is_slowed_down_is_found_slower(tmp_path):
    class _Slowed(PlainBench):
        def fio(self, name, sections):
            # A pause after each batch, as a slower device makes it.
            slow = {"job": {**sections["job"], "thinktime": "30ms", "thinktime_blocks": 64}}
            return super().fio(name, {**sections, **slow})

    parameters = completed(scenario, size_bytes=32 * _MIB)
    benches = {}
    for name, kind in (("slowed", _Slowed), ("plain", PlainBench)):
        (tmp_path / name).mkdir()
        benches[name] = kind(tmp_path / name, parameters)
    passes = {name: random_update._Fio(bench, direct=True) for name, bench in benches.items()}
    for name, bench in benches.items():
        passes[name].fill(bench.path / "data")
    pairs = []
    for number in range(6):
        names = ("slowed", "plain") if number % 2 else ("plain", "slowed")
        took = {name: passes[name].update(benches[name].path / "data", f"update-{number}").durable_s for name in names}
        pairs.append((took["slowed"], took["plain"]))
    ratio = paired_ratio(pairs, seed=1)
    assert ratio.shown, pairs
    assert ratio.low > 1, pairs


@pytest.mark.needs("root", "loop", "ext4")
def test_full_disk_is_told():
    with loop_filesystem("ext4", 32 * _MIB, base="/dev/shm") as made:
        bench = PlainBench(made.point, completed(scenario, size_bytes=64 * _MIB))
        with pytest.raises(CommandError, match="No space left on device") as caught:
            scenario.run(bench)
        assert "--size" in caught.value.hint


@pytest.mark.needs("root", "loop", "btrfs", "xfs")
@pytest.mark.parametrize(("fs_type", "options"), [("xfs", ()), ("btrfs", ("nodatacow",)), ("btrfs", ())])
def test_buffered_direct_writes_are_noticed(fs_type, options):
    with loop_filesystem(fs_type, 320 * _MIB, mount_options=options, base="/dev/shm") as made:
        found = buffers_direct_writes(made.point)
        assert found is not None
        # Since Linux 6.15 where there are checksums, which older kernels write direct.
        if fs_type == "xfs" or options:
            assert not found
        assert not list(made.point.glob(".probe*"))
