"""Each storage of the benchmark, made on a device: it can be measured on, its snapshots are ones, and it goes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.api import CommandError, ConfigError, MissingRequirementError, ProvisionOrder, StorageError
from snapmgr.bench.storage.stacks import STACKS, Controls, backend_of, missing_requirements, provisioner_of
from snapmgr.system.command import CommandRunner
from snapmgr.system.mount import KernelMounter
from snapmgr_juicefs.client import recognise
from support.bench.device import USED_BYTES, BenchDevice, bench_device
from support.storage import processes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "xfs", "ext4")

_WITH_SNAPSHOTS = ("btrfs", "btrfs-nocow", "xfs-reflink")
_CONTROLS = ("ext4", "ext4-dioread-lock", "xfs")


@pytest.fixture
def device() -> Iterator[BenchDevice]:
    with bench_device() as made:
        yield made


@pytest.mark.parametrize("stack", _WITH_SNAPSHOTS)
def test_snapshot_is_one_and_all_goes(device: BenchDevice, stack: str) -> None:
    with device.bench(stack) as bench:
        file = bench.path / "file"
        old = os.urandom(4 << 20)
        file.write_bytes(old)
        snapshot = bench.snapshot()
        assert 0 < snapshot.create_s <= snapshot.whole_s
        assert [found.ref for found in bench.inventory()] == [snapshot.ref]
        new = os.urandom(len(old))
        _overwrite(file, new)
        with snapshot.opened() as folder:
            assert (folder / "file").read_bytes() == old
            with pytest.raises(OSError, match="Read-only"):
                (folder / "more").write_bytes(b"")
        with snapshot.opened(writable=True) as folder:
            _overwrite(folder / "file", b"changed in the clone")
            assert file.read_bytes() == new
        with snapshot.opened() as folder:
            assert (folder / "file").read_bytes() == old
        bench.quiet()
        # All its blocks are its own by now.
        assert snapshot.usage().exclusive_bytes >= len(old)
        free = _free_bytes(bench.path)
        assert snapshot.delete() > 0
        bench.quiet()
        assert _free_bytes(bench.path) >= free + len(old) * 3 // 4
        assert bench.inventory() == ()
    assert device.left() == []
    assert device.tail_is_untouched()


@pytest.mark.needs("juicefs")
def test_juicefs_is_made_and_goes(device: BenchDevice) -> None:
    assert missing_requirements(STACKS["juicefs"]) == ()
    with device.bench("juicefs") as bench:
        file = bench.path / "file"
        old = os.urandom(4 << 20)
        with bench.measured() as part:
            file.write_bytes(old)
            bench.quiet()
        assert part.spent.written_bytes >= len(old)
        snapshot = bench.snapshot()
        _overwrite(file, os.urandom(len(old)))
        with snapshot.opened() as folder:
            assert (folder / "file").read_bytes() == old
        with snapshot.opened(writable=True) as folder:
            _overwrite(folder / "file", b"changed in the clone")
        with snapshot.opened() as folder:
            assert (folder / "file").read_bytes() == old
        snapshot.delete()
        assert bench.inventory() == ()
        mount = next(one for one in KernelMounter().mounts() if one.fs_type == "fuse.juicefs")
        assert str(bench.path).startswith(mount.point)
    assert device.left() == []
    assert processes_of(device.device) == processes_of(mount.point) == []
    assert device.tail_is_untouched()


@pytest.mark.parametrize("stack", _CONTROLS)
def test_control_has_no_snapshots_and_goes(device: BenchDevice, stack: str) -> None:
    with device.bench(stack) as bench:
        (bench.path / "file").write_bytes(b"data")
        with pytest.raises(MissingRequirementError, match="has no snapshots"):
            bench.snapshot()
        with pytest.raises(MissingRequirementError, match="has no snapshots"):
            bench.inventory()
        assert bench.provisioned.mount_options
        if stack == "ext4-dioread-lock":
            assert "nodioread_nolock" in bench.provisioned.mount_options
    assert device.left() == []
    assert device.tail_is_untouched()


def test_what_was_run_is_recorded_and_counted(device: BenchDevice) -> None:
    with device.bench("btrfs-nocow") as bench:
        capacity = bench.provisioned.capacity_bytes
        assert 0 < capacity < USED_BYTES // 2
        with bench.measured() as part:
            done = bench.fio(
                "fill",
                {"global": {"bs": "64k", "rw": "write", "end_fsync": 1}, "load": {"filename": "f", "size": "8m"}},
            )
            bench.run(["sync", "-f", str(bench.path)])
        assert (8 << 20) <= part.spent.written_bytes < (12 << 20)
        layout = bench.layout(bench.path / "f")
        assert layout.extents >= 1
        attributes = bench.run(["lsattr", str(bench.path / "f")]).stdout.split()[0]
        assert "C" in attributes
        record = bench.record()
    assert record["jobs"] == {"fill": done.job_file}
    assert str(bench.path) in done.job_file
    programs = [argv[0] for argv in record["commands"]]
    assert programs == ["mkfs.btrfs", "mount", "btrfs", "chattr", "env", "sync", "lsattr"]
    assert record["provisioned"]["devices"] == (device.device,)
    assert record["provisioned"]["memory_bounded"] is False


def test_cold_reads_come_from_the_device(device: BenchDevice) -> None:
    with device.bench("xfs") as bench:
        file = bench.path / "file"
        file.write_bytes(os.urandom(4 << 20))
        bench.cold()
        with bench.measured() as cold:
            file.read_bytes()
        with bench.measured() as warm:
            file.read_bytes()
    assert cold.spent.read_bytes >= 4 << 20
    assert warm.spent.read_bytes == 0


@pytest.mark.needs("juicefs")
def test_cold_reads_come_from_the_object_store_and_not_from_the_clients_cache(device: BenchDevice) -> None:
    name = "juicefs_object_request_data_bytes_GET"
    with device.bench("juicefs") as bench:
        client = recognise(next(one for one in KernelMounter().mounts() if one.fs_type == "fuse.juicefs"))
        assert bench.record()["provisioned"]["cache_dirs"] == client.read_dirs()
        file = bench.path / "file"
        file.write_bytes(os.urandom(8 << 20))
        for _ in range(2):
            bench.cold()
            before = client.counters()
            with bench.measured() as cold:
                file.read_bytes()
            after = client.counters()
            assert after[name] - before.get(name, 0) >= 8 << 20
            assert cold.spent.read_bytes >= 8 << 20


def test_quiet_waits_for_the_cleaner(device: BenchDevice) -> None:
    with device.bench("btrfs") as bench:
        (bench.path / "file").write_bytes(os.urandom(8 << 20))
        snapshot = bench.snapshot()
        _overwrite(bench.path / "file", os.urandom(8 << 20))
        free = _free_bytes(bench.path)
        snapshot.delete(wait="name")
        assert bench.quiet() > 0
        assert _free_bytes(bench.path) >= free + (6 << 20)


@pytest.mark.parametrize("stack", [*_WITH_SNAPSHOTS, "xfs"])
def test_unprovisioning_is_idempotent(device: BenchDevice, stack: str, tmp_path: Path) -> None:
    runner, mounter = CommandRunner(), KernelMounter()
    backend = backend_of(STACKS[stack], {}, runner, mounter)
    provisioner = provisioner_of(STACKS[stack], backend, runner, mounter)
    point = tmp_path / "point"
    point.mkdir()
    order = ProvisionOrder(
        id="0123456789abcdef", point=str(point), size_bytes=USED_BYTES, options=STACKS[stack].options
    )
    provisioner.unprovision(device.device, order)
    with provisioner.provision(device.device, order) as provisioned:
        assert os.path.ismount(point)
        assert provisioned.devices == (device.device,)
        provisioner.unprovision(device.device, order)
        assert not os.path.ismount(point)
        provisioner.unprovision(device.device, order)
    assert device.left() == []


def test_what_a_killed_mkfs_left_is_detached_and_nothing_else(device: BenchDevice, tmp_path: Path) -> None:
    runner = CommandRunner()
    other_bytes = USED_BYTES - (64 << 20)
    cut, other = (
        runner.run(["losetup", "--find", "--show", "--sizelimit", str(size), device.device]).stdout.strip()
        for size in (USED_BYTES, other_bytes)
    )
    try:
        order = ProvisionOrder(id="0" * 16, point=str(tmp_path), size_bytes=USED_BYTES, options={"file_system": "xfs"})
        Controls(runner, KernelMounter()).unprovision(device.device, order)
        assert device.left() == [f"{other.removeprefix('/dev/')} on {device.device}"]
    finally:
        for loop in (cut, other):
            if Path("/sys/block", loop.removeprefix("/dev/"), "loop").exists():
                runner.run(["losetup", "--detach", loop])


def test_a_device_that_is_too_small_is_told(device: BenchDevice, tmp_path: Path) -> None:
    runner, mounter = CommandRunner(), KernelMounter()
    for stack in (*_WITH_SNAPSHOTS, "xfs", "ext4"):
        provisioner = provisioner_of(STACKS[stack], backend_of(STACKS[stack], {}, runner, mounter), runner, mounter)
        order = ProvisionOrder(id="0" * 16, point=str(tmp_path), size_bytes=32 << 20, options=STACKS[stack].options)
        with (
            pytest.raises(StorageError, match="32.0 MiB are too little for"),
            provisioner.provision(device.device, order),
        ):
            pass
    # Nothing was written.
    with device.image.open("rb") as file:
        assert file.read(1 << 20) == bytes(1 << 20)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"file_system": "reiserfs"}, "file_system cannot be 'reiserfs'"),
        ({"filesystem": "xfs"}, "no option 'filesystem'"),
    ],
)
def test_wrong_options_are_refused(device: BenchDevice, tmp_path: Path, options: dict[str, str], said: str) -> None:
    order = ProvisionOrder(id="0" * 16, point=str(tmp_path), size_bytes=USED_BYTES, options=options)
    provisioner = Controls(CommandRunner(), KernelMounter())
    with pytest.raises(ConfigError, match=said), provisioner.provision(device.device, order):
        pass


def test_a_mount_option_that_the_kernel_refuses_leaves_nothing(device: BenchDevice, tmp_path: Path) -> None:
    order = ProvisionOrder(
        id="0" * 16, point=str(tmp_path), size_bytes=USED_BYTES, options={"mount_options": "no-such-option"}
    )
    with (
        pytest.raises(CommandError, match="no-such-option"),
        Controls(CommandRunner(), KernelMounter()).provision(device.device, order),
    ):
        pass
    assert device.left() == []


def test_this_machine_lacks_nothing_for_these() -> None:
    for stack in (*_WITH_SNAPSHOTS, *_CONTROLS, "ext4-dioread-nolock"):
        assert missing_requirements(STACKS[stack]) == ()


def _overwrite(file: Path, data: bytes) -> None:
    with file.open("r+b") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def _free_bytes(path: Path) -> int:
    CommandRunner().run(["sync", "-f", str(path)])
    room = os.statvfs(path)
    return room.f_bfree * room.f_frsize
