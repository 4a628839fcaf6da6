"""Memory, and so the page cache, is bounded by a control group: here, where the memory controller is of version 2."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from snapmgr.bench.measure import memory
from snapmgr.testing.processes import spawn, succeeds
from support import lvm
from support.bench.device import bench_disk
from support.storage import work_folder

_MIB = 1 << 20


@pytest.fixture
def groups(monkeypatch):
    with work_folder() as folder:
        lvm.run("mount", "-t", "cgroup2", "none", folder)
        monkeypatch.setattr(memory, "ROOT", folder)
        try:
            yield folder
        finally:
            lvm.run("umount", folder)


def test_page_cache_is_bounded_and_the_group_goes(disk, groups):
    with bench_disk(disk) as device:

        def write_more_than_fits():
            with device.bench("ext4", memory_bytes=128 * _MIB) as bench:
                (group,) = groups.glob("snapmgr-bench-*")
                with (bench.path / "file").open("wb") as file:
                    for _ in range(192):
                        file.write(os.urandom(_MIB))
                assert 64 * _MIB < int((group / "memory.current").read_text()) <= 128 * _MIB
                # What is started is bounded too.
                assert group.name in bench.run(["cat", "/proc/self/cgroup"]).stdout
                assert bench.record()["provisioned"]["memory_bounded"] is True
            assert group.name not in Path("/proc/self/cgroup").read_text()

        assert memory.missing_requirement() is None
        assert succeeds(spawn(write_more_than_fits))
        assert list(groups.glob("snapmgr-bench-*")) == []
        assert device.left() == []
