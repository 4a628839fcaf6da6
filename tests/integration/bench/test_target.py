"""The benchmark formats a device only if it is blank, ours, or named by its word; nothing else is ever written to."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import sys
import time
import zlib
from contextlib import ExitStack
from pathlib import Path
from textwrap import dedent

import pytest

from snapmgr.bench.device import blockdevice as bench_device
from snapmgr.bench.device.mark import usable_bytes
from snapmgr.bench.device.precondition import make_steady
from snapmgr.bench.device.target import opened_target, preview_target
from snapmgr.contract.errors import BusyError, ConfigError, StorageError
from snapmgr.system.blockdev import read_mounts
from snapmgr.system.command import CommandRunner
from support.storage import loop_devices, loop_filesystem, shielded, work_folder

pytestmark = pytest.mark.needs("root", "loop", "ext4")

MIB = 1 << 20
SIZE = 160 * MIB
RUN = CommandRunner()


class Disk:
    """A loop device on a sparse file: somebody's disk."""

    def __init__(self, image: Path, size: int = SIZE) -> None:
        self.image = image
        with image.open("ab") as file:
            file.truncate(size)
        with shielded():
            self.path = RUN.run(["losetup", "--find", "--show", str(image)]).stdout.strip()

    @property
    def word(self) -> str:
        return f"loop:{self.image}"

    def write(self, at: int, data: bytes) -> None:
        with open(self.path, "r+b") as file:
            file.seek(at)
            file.write(data)

    def state(self) -> tuple[int, int]:
        """Return what changes with any write to it."""
        self.flush()
        found = self.image.stat()
        return found.st_mtime_ns, found.st_blocks

    def flush(self) -> None:
        fd = os.open(self.path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    def release(self) -> None:
        RUN.run(["swapoff", self.path], ok=(0, 255, 1, 2, 4, 8, 16, 32, 64))
        for mount in reversed(read_mounts()):
            if mount.source == self.path:
                RUN.run(["umount", mount.point])
        if loop_devices().get(self.path) == str(self.image):
            RUN.run(["losetup", "--detach", self.path])


@pytest.fixture(name="folder")
def _folder():
    with work_folder(Path("/dev/shm")) as folder:
        yield folder


@pytest.fixture(name="disk")
def _disk(folder):
    disk = Disk(folder / "disk")
    yield disk
    with shielded():
        disk.release()


def refusal(path: str, wipe: str | None = None, needed: int | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as raised, opened_target(path, size_bytes=needed, wipe=wipe):
        pass
    assert raised.value.exit_code == 2
    return raised.value


def take(path: str, wipe: str | None = None) -> None:
    with opened_target(path, size_bytes=None, wipe=wipe) as target:
        target.check()


def mbr() -> bytes:
    """One partition of Linux's type, from 1 MiB on, 64 MiB long."""
    entry = struct.pack("<B3sB3sII", 0, b"\0\0\0", 0x83, b"\0\0\0", 2048, 131072)
    return (bytes(440) + b"\x12\x34\x56\x78\0\0" + entry).ljust(510, b"\0") + b"\x55\xaa"


def lvm_label() -> bytes:
    """The label of a physical volume, in its second sector."""
    body = struct.pack("<I8s", 32, b"LVM2 001") + b"abcdefghijklmnopqrstuvwxyz012345"
    body = body.ljust(512 - 20, b"\0")
    checksum = zlib.crc32(body, 0xF597A6CF ^ 0xFFFFFFFF) ^ 0xFFFFFFFF
    return struct.pack("<8sQI", b"LABELONE", 1, checksum) + body


def raid_superblock() -> bytes:
    """Metadata 1.2 of md, which lie 4 KiB behind the beginning; one member."""
    head = struct.pack("<IIII16s32sQIIQII", 0xA92B4EFC, 1, 0, 0, b"\x11" * 16, b"host:0", 0, 1, 0, 1000, 0, 2)
    super_block = bytearray(head.ljust(258, b"\0"))
    struct.pack_into("<QQ", super_block, 128, 2048, 1000)
    struct.pack_into("<Q", super_block, 144, 8)  # super_offset in sectors
    words = sum(struct.unpack_from("<64I", super_block)) + struct.unpack_from("<H", super_block, 256)[0]
    struct.pack_into("<I", super_block, 216, (words & 0xFFFFFFFF) + (words >> 32))
    return bytes(super_block)


SIGNATURES = {
    "ext4": ("ext4 (UUID", lambda disk: RUN.run(["mkfs.ext4", "-q", disk.path])),
    "swap": ("swap (UUID", lambda disk: RUN.run(["mkswap", disk.path])),
    "partition table": ("dos partition table", lambda disk: disk.write(0, mbr())),
    "LVM": ("LVM2_member (UUID", lambda disk: disk.write(512, lvm_label())),
    "RAID": ("linux_raid_member (UUID", lambda disk: disk.write(4096, raid_superblock())),
    "LUKS": ("crypto_LUKS", lambda disk: disk.write(0, b"LUKS\xba\xbe\0\x01" + bytes(160) + b"1" * 36)),
    "no signature": ("data without a signature", lambda disk: disk.write(3 * MIB, b"precious" * MIB)),
    "at the end": ("data without a signature", lambda disk: disk.write(SIZE - 8, b"precious")),
}


@pytest.mark.parametrize("kind", SIGNATURES)
def test_what_is_on_a_device_is_named_and_stays_until_its_word_is_given(disk, kind):
    shown, make = SIGNATURES[kind]
    make(disk)
    before = disk.state()
    error = refusal(disk.path)
    assert "is not blank" in error.message
    assert shown in error.message
    assert disk.word in error.message
    assert "160.0 MiB" in error.message
    assert error.hint.endswith(f"snapmgr bench run --on {disk.path} --wipe {disk.word}")
    with pytest.raises(ConfigError, match="is not blank"):
        preview_target(disk.path, size_bytes=None, wipe=None)
    assert "does not name" in refusal(disk.path, wipe="S5Y1NG0R").message
    assert disk.state() == before
    assert disk.word in preview_target(disk.path, size_bytes=None, wipe=disk.word)
    assert disk.state() == before
    take(disk.path, wipe=disk.word)
    assert disk.state() != before
    take(disk.path)


def test_the_line_to_paste_is_the_users_own(disk):
    disk.write(0, b"x")
    with (
        pytest.raises(ConfigError) as raised,
        opened_target(
            disk.path, size_bytes=None, wipe=None, line=("snapmgr", "bench", "run", "blog", "--on", "/dev/x y")
        ),
    ):
        pass
    assert raised.value.hint.endswith(f"snapmgr bench run blog --on '/dev/x y' --wipe {disk.word}")


def test_a_blank_device_is_taken_made_use_of_and_left_blank(disk):
    with opened_target(disk.path, size_bytes=100 * MIB, wipe=None) as target:
        assert (target.device, target.kind, target.size_bytes) == (disk.path, "device", SIZE - MIB)
        for _ in range(2):
            target.check()
            RUN.run(["mkfs.ext4", "-q", target.device, str(target.size_bytes // 1024)])
            target.made()
            target.blank()
        facts = target.facts()
    assert (facts["kind"], facts["size_bytes"], facts["marked"]) == ("device", SIZE - MIB, True)
    assert disk.word not in str(facts)
    assert RUN.run(["blkid", "-p", disk.path], ok=(2,)).stdout == ""
    take(disk.path)


def test_a_device_that_is_too_small_is_refused_before_anything_is_written(folder, disk):
    before = disk.state()
    assert "160.0 MiB are needed" in refusal(disk.path, needed=SIZE).message
    assert disk.state() == before
    small = Disk(folder / "small", 100 * MIB)
    try:
        assert "too small" in refusal(small.path).message
    finally:
        small.release()


def test_partitions_are_named_with_what_is_in_them_and_a_blank_one_may_be_taken(disk):
    disk.write(0, mbr())
    RUN.run(["addpart", disk.path, "1", "2048", str((SIZE - 2 * MIB) // 512)])
    part = f"{disk.path}p1"
    try:
        take(part)
        RUN.run(["mkfs.ext4", "-q", part])
        assert f"a partition {part}: ext4" in refusal(disk.path).message
        assert refusal(part).hint.endswith(f"--wipe {disk.word}-part1")
        assert "does not name" in refusal(part, wipe=disk.word).message
        with mounted(part, disk.image.parent):
            assert f"its partition {part}: mounted at" in refusal(disk.path, wipe=disk.word).message
        with opened_target(part, size_bytes=None, wipe=f"{disk.word}-part1") as target:
            # Nobody may write another table, or take the whole disk, meanwhile.
            with pytest.raises(BusyError):
                quickly_locked(disk.path)
            target.check()
        take(disk.path, wipe=disk.word)
        assert not Path(part).exists()
    finally:
        RUN.run(["delpart", disk.path, "1"], ok=(0, 1))


@contextlib.contextmanager
def mounted(device: str, folder: Path):
    point = folder / "mnt"
    point.mkdir(exist_ok=True)
    RUN.run(["mount", device, str(point)])
    try:
        yield
    finally:
        RUN.run(["umount", str(point)])


def quickly_locked(path: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench_device, "_LOCK_PATIENCE_S", 0.1)
        take(path)


def test_a_mounted_device_is_never_taken_whatever_is_said(disk):
    RUN.run(["mkfs.ext4", "-q", disk.path])
    with mounted(disk.path, disk.image.parent):
        (disk.image.parent / "mnt/file").write_text("precious")
        for wipe in (None, disk.word):
            error = refusal(disk.path, wipe)
            assert f"mounted at {disk.image.parent}/mnt" in error.message
            assert "--wipe does not override" in error.hint
        assert (disk.image.parent / "mnt/file").read_text() == "precious"


def test_a_mount_in_another_namespace_is_found(disk):
    RUN.run(["mkfs.ext4", "-q", disk.path])
    (disk.image.parent / "mnt").mkdir()
    script = f'mount {disk.path} "{disk.image.parent}/mnt" && echo ready && exec sleep 60'
    argv = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"ready\n"
            assert f"mount namespace of process {holder.pid}" in refusal(disk.path, wipe=disk.word).message
        finally:
            holder.kill()


def test_active_swap_is_never_taken(disk):
    RUN.run(["mkswap", disk.path])
    try:
        RUN.run(["swapon", disk.path])
    except Exception:  # noqa: BLE001
        pytest.skip("the kernel takes no swap here")
    assert "active swap" in refusal(disk.path, wipe=disk.word).message
    RUN.run(["swapoff", disk.path])


def test_a_read_only_device_is_never_taken(disk):
    path = RUN.run(["losetup", "--find", "--show", "--read-only", str(disk.image)]).stdout.strip()
    try:
        assert "it is read-only" in refusal(path, wipe=disk.word).message
    finally:
        RUN.run(["losetup", "--detach", path])


def test_a_device_below_another_loop_device_is_never_taken(disk):
    above = RUN.run(["losetup", "--find", "--show", disk.path]).stdout.strip()
    try:
        assert f"the loop device {above} lies on {disk.path}" in refusal(disk.path, wipe=disk.word).message
    finally:
        RUN.run(["losetup", "--detach", above])


@pytest.mark.parametrize(("flags", "why"), [(os.O_EXCL, "something holds it"), (0, "open for writing")])
def test_a_device_that_another_process_has_open_is_never_taken(disk, flags, why):
    """Exclusively, as a storage on top does; or only for writing, as a virtual machine does."""
    script = f"import os, time; os.open({disk.path!r}, os.O_RDWR | {flags}); print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout.readline() == b"ready\n"
            assert why in refusal(disk.path, wipe=disk.word).message
        finally:
            holder.kill()
    take(disk.path)


def test_two_runs_do_not_share_a_device(disk):
    with opened_target(disk.path, size_bytes=None, wipe=None) as target:
        with pytest.raises(BusyError, match="is locked") as raised:
            quickly_locked(disk.path)
        assert raised.value.exit_code == 3
        target.check()


def test_a_lock_that_udev_holds_for_a_moment_is_waited_for(disk):
    fd = os.open(disk.path, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_SH)
    pid = os.fork()
    if pid == 0:
        time.sleep(0.3)
        fcntl.flock(fd, fcntl.LOCK_UN)
        os._exit(0)
    try:
        take(disk.path)
    finally:
        os.close(fd)
        os.waitpid(pid, 0)


def test_any_node_of_a_device_is_that_device(disk, folder):
    """A lock on a node that somebody made by hand would keep nobody out."""
    node, link = folder / "node", folder / "link"
    os.mknod(node, 0o600 | 0o060000, os.stat(disk.path).st_rdev)
    link.symlink_to(disk.path)
    for path in (node, link):
        with opened_target(str(path), size_bytes=None, wipe=None) as target:
            assert target.device == disk.path
    with opened_target(str(link), size_bytes=None, wipe=None), pytest.raises(BusyError):
        quickly_locked(str(node))


# ------------------------------------------------------------------------------------- between the check and the mkfs


@contextlib.contextmanager
def let_go(disk: Disk, target):
    """Have the loop device lose its file; within the context nothing but its state tells that it did.

    The kernel keeps a loop device alive that is open, and the name of a disk: so the target's descriptor is closed.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, target._fd)
    os.close(null)
    RUN.run(["losetup", "--detach", disk.path])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fstat", lambda _fd: os.stat(disk.path))
        yield


def assert_stopped(target, why: str) -> None:
    for step in (target.check, target.blank):
        with pytest.raises(StorageError, match=why) as raised:
            step()
        assert "nothing was formatted" in raised.value.message


def assert_stopped_at_the_end(stack: ExitStack, why: str) -> None:
    with pytest.raises(StorageError, match=why):
        stack.close()


def test_a_device_that_vanishes_is_noticed(disk):
    with ExitStack() as stack:
        target = stack.enter_context(opened_target(disk.path, size_bytes=None, wipe=None))
        with let_go(disk, target):
            assert_stopped(target, "it was 160.0 MiB large and is 0 B")
            assert_stopped_at_the_end(stack, "is 0 B")


def test_another_file_on_the_same_loop_device_is_noticed_and_left_alone(disk, folder):
    other = folder / "other"
    other.write_bytes(b"precious" * (SIZE // 8))
    with ExitStack() as stack:
        target = stack.enter_context(opened_target(disk.path, size_bytes=None, wipe=None))
        with let_go(disk, target):
            RUN.run(["losetup", disk.path, str(other)])
            try:
                assert_stopped(target, "another file of a loop device")
                assert_stopped_at_the_end(stack, "another file of a loop device")
            finally:
                RUN.run(["losetup", "--detach", disk.path])
    assert other.read_bytes() == b"precious" * (SIZE // 8)


def test_the_same_file_attached_once_more_is_another_disk_to_the_kernel(disk):
    """Only the kernel's sequence number differs."""
    if not Path("/sys/block", os.path.basename(disk.path), "diskseq").exists():
        pytest.skip("the kernel has no diskseq (Linux 5.15)")
    with ExitStack() as stack:
        target = stack.enter_context(opened_target(disk.path, size_bytes=None, wipe=None))
        with let_go(disk, target):
            RUN.run(["losetup", disk.path, str(disk.image)])
            assert_stopped(target, "another disk")
            assert_stopped_at_the_end(stack, "another disk")


def test_a_name_that_leads_to_another_device_is_noticed(disk, folder):
    other = Disk(folder / "other")
    try:
        before = other.state()
        with opened_target(disk.path, size_bytes=None, wipe=None) as target:
            target.device = other.path
            assert_stopped(target, "leads to another device")
            target.device = disk.path
        assert other.state() == before
    finally:
        other.release()


def test_a_device_that_somebody_mounts_meanwhile_is_noticed_and_left_alone(disk):
    with ExitStack() as stack:
        target = stack.enter_context(opened_target(disk.path, size_bytes=None, wipe=None))
        RUN.run(["mkfs.ext4", "-q", disk.path])
        with mounted(disk.path, disk.image.parent):
            (disk.image.parent / "mnt/file").write_text("precious")
            assert_stopped(target, f"mounted at {disk.image.parent}/mnt")
            assert_stopped_at_the_end(stack, "mounted at")
            assert (disk.image.parent / "mnt/file").read_text() == "precious"
    assert "is not blank: ext4" in refusal(disk.path).message


def test_what_fails_meanwhile_is_told_and_the_device_is_left_blank(disk):
    def fail() -> None:
        with opened_target(disk.path, size_bytes=None, wipe=None):
            RUN.run(["mkfs.ext4", "-q", disk.path])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    take(disk.path)


# ----------------------------------------------------------------------------------------------------------- our mark


def killed_with(disk: Disk, body: str) -> None:
    """Take the device in another process, do something, and die by SIGKILL."""
    script = f"""
        import os, signal, subprocess
        from snapmgr.bench.device.target import opened_target
        with opened_target({disk.path!r}, size_bytes=None, wipe=None) as target:
            {body}
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", dedent(script)], check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


MKFS = "subprocess.run(['mkfs.ext4', '-q', target.device, '150M'], check=True)"


def test_what_a_killed_run_noted_is_taken_by_the_next(disk):
    killed_with(disk, f"{MKFS}; target.made()")
    assert "ext4" in RUN.run(["blkid", "-p", disk.path]).stdout
    take(disk.path)


def test_what_a_killed_run_could_not_note_needs_its_word(disk):
    killed_with(disk, MKFS)
    assert "ext4" in refusal(disk.path).message


def test_a_file_system_made_after_a_killed_run_is_not_ours(disk):
    killed_with(disk, f"{MKFS}; target.made()")
    RUN.run(["mkfs.ext4", "-q", "-F", disk.path, "150M"])
    assert "is not blank: ext4" in refusal(disk.path).message


def test_data_written_after_a_run_that_ended_are_not_ours(disk):
    take(disk.path)
    disk.write(0, b"encrypted without a header")
    assert "data without a signature" in refusal(disk.path).message


def test_a_mark_copied_to_another_device_counts_for_nothing(disk, folder):
    killed_with(disk, f"{MKFS}; target.made()")
    disk.flush()
    (folder / "copy").write_bytes(disk.image.read_bytes())
    copy = Disk(folder / "copy")
    try:
        assert "is not blank: ext4" in refusal(copy.path).message
    finally:
        copy.release()
    take(disk.path)


def test_a_damaged_mark_counts_for_nothing(disk):
    killed_with(disk, f"{MKFS}; target.made()")
    disk.write(usable_bytes(SIZE) + 40, b"?")
    assert "is not blank: ext4" in refusal(disk.path).message


def test_a_disk_that_cannot_be_probed_is_not_taken_for_blank(disk):
    class Deaf(CommandRunner):
        def run(self, argv, **options):
            return super().run(["false"] if argv[0] == "wipefs" else argv, **options)

    with (
        pytest.raises(Exception, match="false failed"),
        opened_target(disk.path, size_bytes=None, wipe=None, runner=Deaf()),
    ):
        pass


# ----------------------------------------------------------------------------------------------------- a loop device


def test_a_loop_device_of_our_own_has_its_blocks_and_goes_with_the_context(folder):
    with opened_target(f"loop:130M:{folder}", size_bytes=None, wipe=None, written=False) as target:
        assert (target.kind, target.size_bytes) == ("loop", 130 * MIB)
        assert list(folder.iterdir()) == []
        assert Path("/sys/block", os.path.basename(target.device), "loop/autoclear").read_text() == "1\n"
        RUN.run(["mkfs.ext4", "-q", target.device])  # discards all that it can
        target.check()
        assert target.facts()["allocated_bytes"] >= 130 * MIB
        target.blank()
        assert RUN.run(["blkid", "-p", target.device], ok=(2,)).stdout == ""
    assert not any(str(folder) in file for file in loop_devices().values())


def test_a_loop_devices_blocks_are_written_before_they_are_used():
    with work_folder(Path("/var/tmp")) as folder, opened_target(str(folder), size_bytes=128 * MIB, wipe=None) as target:
        facts = target.facts()
        assert (facts["written"], facts["size_bytes"]) == (True, 128 * MIB)
        assert facts["allocated_bytes"] >= 128 * MIB
        assert str(folder) not in str(facts)


@pytest.mark.needs("btrfs")
def test_on_btrfs_the_file_is_written_in_place():
    with (
        loop_filesystem("btrfs", 600 * MIB, base=Path("/dev/shm")) as below,
        opened_target(f"loop:128M:{below.point}", size_bytes=None, wipe=None, written=False) as target,
    ):
        assert target.facts()["nocow"] is True
        target.check()


def test_over_a_disk_of_large_sectors_direct_io_is_kept_by_blocks_as_large(folder):
    (folder / "below").touch()
    os.truncate(folder / "below", 600 * MIB)
    argv = ["losetup", "--find", "--show", "--sector-size", "4096", "--direct-io=on", str(folder / "below")]
    below = RUN.run(argv).stdout.strip()
    try:
        RUN.run(["mkfs.ext4", "-q", below])
        with (
            mounted(below, folder),
            opened_target(f"loop:128M:{folder}/mnt", size_bytes=None, wipe=None, written=False) as target,
        ):
            facts = target.facts()
            assert (facts["direct_io"], facts["block_bytes"]) == (True, 4096)
    finally:
        RUN.run(["losetup", "--detach", below])


def test_wipe_is_not_for_files(folder):
    assert "--wipe is for devices" in refusal(f"loop:130M:{folder}", wipe="S1").message


def test_another_file_behind_our_loop_device_is_noticed(folder, disk):
    with opened_target(f"loop:130M:{folder}", size_bytes=None, wipe=None, written=False) as target:
        mine, target.device = target.device, disk.path
        with pytest.raises(StorageError, match="another file"):
            target.blank()
        target.device = "/dev/loop-control"
        with pytest.raises(StorageError, match="is detached from its file"):
            target.check()
        target.device = mine
        target.check()


def test_a_kill_leaves_no_loop_device_and_no_file(folder):
    script = f"""
        import os, signal, subprocess
        from snapmgr.bench.device.target import opened_target
        with opened_target("loop:130M:{folder}", size_bytes=None, wipe=None, written=False) as target:
            print(target.device, flush=True)
            subprocess.run(["mkfs.ext4", "-q", target.device], check=True)
            os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", dedent(script)], check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + 10
    while any(str(folder) in file for file in loop_devices().values()):
        assert time.monotonic() < deadline, loop_devices()
        time.sleep(0.02)
    assert list(folder.iterdir()) == []
    assert os.statvfs(folder).f_bfree > 0


def test_a_full_disk_below_is_told_before_anything_is_measured(folder, monkeypatch):
    RUN.run(["mount", "-t", "tmpfs", "-o", "size=64M", "tmpfs", str(folder)])
    try:
        monkeypatch.setattr("snapmgr.bench.device.target.loop_target", unchecked())
        with (
            pytest.raises(StorageError, match="cannot make a file of 130.0 MiB .*No space left") as raised,
            opened_target(f"loop:130M:{folder}", size_bytes=None, wipe=None),
        ):
            pass
        assert "smaller SIZE" in raised.value.hint
    finally:
        RUN.run(["umount", str(folder)])


def unchecked():
    """Return `loop_target` as it is when the room goes away after it was looked at."""
    from snapmgr.bench.device import loopfile  # noqa: PLC0415

    @contextlib.contextmanager
    def target(*arguments, **options):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loopfile, "require_room", lambda _folder, _size: "tmpfs")
            with loopfile.loop_target(*arguments, **options) as made:
                yield made

    return target


@pytest.mark.needs("fio")
def test_a_device_is_written_to_its_usable_end_and_not_beyond_before_it_counts_as_steady(disk, tmp_path):
    with opened_target(disk.path, size_bytes=None, wipe=disk.word) as target:
        disk.flush()
        behind = disk.image.read_bytes()[target.size_bytes :]
        done = make_steady(target, within_s=3.0, folder=tmp_path, runner=RUN, tell=lambda _text: None)
        disk.flush()
        written = disk.image.read_bytes()
        pieces = range(0, target.size_bytes, MIB)
        assert all(any(written[at : at + MIB]) for at in pieces), "each piece of it"
        assert written[target.size_bytes :] == behind
        assert done.written_bytes == 2 * target.size_bytes
        assert done.rounds
        target.discard = False
        target.blank()
        assert not target.facts()["discarded"]
    with opened_target(disk.path, size_bytes=None, wipe=None):
        "What we have written is known as ours."


# ------------------------------------------------------------------------------------------- the file of a loop device


@pytest.fixture(name="other")
def _other(disk, folder):  # noqa: ARG001 - released after these
    """Yield a function that makes another loop device on the disk's file, which it names in another way."""
    made: list[str] = []

    def other(image: Path, *options: str) -> str:
        with shielded():
            made.append(RUN.run(["losetup", "--find", "--show", *options, str(image)]).stdout.strip())
        return made[-1]

    yield other
    with shielded():
        RUN.run(["umount", str(folder / "point")], ok=(0, 1, 32))
        for path in reversed(made):
            RUN.run(["losetup", "--detach", path])


@pytest.mark.parametrize("name", ["same", "hard link", "bind mount", "partition"])
def test_a_file_that_another_loop_device_has_is_in_use(disk, folder, other, name):
    image, options = disk.image, ()
    RUN.run(["mkfs.ext4", "-q", disk.path])
    if name == "hard link":
        image = folder / "link"
        os.link(disk.image, image)
    elif name == "bind mount":
        image = folder / "bound" / disk.image.name
        image.parent.mkdir()
        with shielded():
            RUN.run(["mount", "--bind", str(folder), str(image.parent)])
    elif name == "partition":
        options = ("--offset", str(MIB), "--sizelimit", str(64 * MIB))
    second = other(image, *options)
    if name == "partition":
        RUN.run(["mkfs.ext4", "-q", "-F", second])
    (folder / "point").mkdir()
    RUN.run(["mount", second, str(folder / "point")])
    try:
        before = (folder / "point").stat().st_ino, disk.image.stat().st_size
        error = refusal(disk.path, wipe=disk.word)
        assert "is in use" in error.message
        assert f"{second} lies on the same file: mounted at {folder / 'point'}" in error.message
        assert ((folder / "point").stat().st_ino, disk.image.stat().st_size) == before
    finally:
        with shielded():
            RUN.run(["umount", str(folder / "point")])
            if name == "bind mount":
                RUN.run(["umount", "--lazy", str(image.parent)])


def test_a_file_that_a_process_writes_to_is_in_use(disk):
    process = subprocess.Popen(["sleep", "60"], stdout=os.open(disk.image, os.O_RDWR))
    try:
        assert f"sleep (pid {process.pid}) has its file open for writing" in refusal(disk.path, disk.word).message
    finally:
        process.kill()
        process.wait()
    take(disk.path, disk.word)


def test_a_loop_device_on_a_device_in_use(disk, folder, other):
    RUN.run(["mkfs.ext4", "-q", disk.path])
    (folder / "point").mkdir()
    RUN.run(["mount", disk.path, str(folder / "point")])
    above = other(Path(disk.path))
    message = refusal(above, wipe=f"loop:{disk.path}").message
    assert f"{disk.path}, on which it lies: mounted at {folder / 'point'}" in message
