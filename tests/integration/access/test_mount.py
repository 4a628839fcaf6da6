"""Private and scratch mounts, on real file systems."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from snapmgr.contract.errors import InUseError, MissingRequirementError, NotFoundError, StorageError
from snapmgr.system.blockdev import read_mounts
from snapmgr.system.mount import KernelMounter, bind, mount_device, remove_point, unmount
from support.storage import loop_filesystem, work_folder

pytestmark = pytest.mark.needs("root", "loop", "ext4")


@pytest.fixture(name="disk", scope="module")
def _disk():
    with loop_filesystem("ext4", 32 << 20, base=Path("/dev/shm")) as disk:
        (disk.point / "file").write_text("on the disk")
        yield disk


@pytest.fixture(name="folder")
def _folder():
    with work_folder() as folder:
        yield folder
        for mount in reversed(read_mounts()):
            if mount.point.startswith(f"{folder}/"):
                unmount(mount.point)


def test_a_private_mount_is_in_no_mount_table_and_reads_and_writes(disk):
    before = read_mounts()
    with KernelMounter().private(disk.device, "ext4") as private:
        assert read_mounts() == before
        assert Path(private.path, "file").read_text() == "on the disk"
        Path(private.path, "new").write_text("x")
        assert "new" in os.listdir(private.fd)
        os.fsync(private.fd)
    assert (disk.point / "new").exists()


def test_a_private_mount_is_nosuid_and_nodev(disk):
    with KernelMounter().private(disk.device, "ext4") as private:
        flags = os.fstatvfs(private.fd).f_flag
    assert flags & os.ST_NOSUID
    assert flags & os.ST_NODEV


def test_a_read_only_private_mount_refuses_writes():
    # ext4, unlike btrfs, refuses "ro" beside a writable mount: it must be mounted nowhere else.
    with loop_filesystem("ext4", 32 << 20, base=Path("/dev/shm")) as disk:
        unmount(str(disk.point))
        with KernelMounter().private(disk.device, "ext4", ("ro",)) as private:
            with pytest.raises(OSError, match="Read-only") as caught:
                Path(private.path, "new").write_text("x")
            assert caught.value.errno == errno.EROFS


def test_nothing_of_a_private_mount_survives_sigkill():
    with loop_filesystem("ext4", 32 << 20, base=Path("/dev/shm")) as disk:
        unmount(str(disk.point))
        script = (
            "import sys, time\nfrom snapmgr.system.mount import KernelMounter\n"
            f"with KernelMounter().private({disk.device!r}, 'ext4') as private:\n"
            "    print('mounted', flush=True)\n    time.sleep(60)\n"
        )
        with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "mounted\n"
            # While it is mounted, nobody else may open the device exclusively.
            with pytest.raises(OSError, match="busy"):
                os.close(os.open(disk.device, os.O_RDWR | os.O_EXCL))
            process.send_signal(signal.SIGKILL)
            process.wait()
        _until_free(disk.device)


def _until_free(device):
    for _ in range(100):
        with suppress(OSError):
            os.close(os.open(device, os.O_RDWR | os.O_EXCL))
            return
        time.sleep(0.05)
    pytest.fail(f"{device} is still held")


def test_a_forked_child_uses_the_private_mount_after_the_parent_closed_it(disk):
    with KernelMounter().private(disk.device, "ext4") as private:
        child = os.fork()
        if child == 0:
            time.sleep(0.3)
            os._exit(0 if Path(private.path, "file").exists() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize(
    ("device", "fs_type", "options", "said"),
    [
        ("/dev/no-such-device", "ext4", (), "No such file"),
        ("disk", "xfs", (), "as xfs"),
        ("disk", "ext4", ("no-such-option=1",), "no-such-option"),
    ],
)
def test_a_failed_private_mount_says_what_and_why(disk, device, fs_type, options, said):
    device = disk.device if device == "disk" else device
    with (
        pytest.raises(StorageError, match=said) as caught,
        KernelMounter().private(device, fs_type, options),
    ):
        pytest.fail("it was mounted")
    assert device in caught.value.message
    assert caught.value.hint


def test_an_unknown_file_system_is_lacking(disk):
    with (
        pytest.raises(MissingRequirementError, match="does not know"),
        KernelMounter().private(disk.device, "nosuchfs"),
    ):
        pytest.fail("it was mounted")


def test_without_root_the_right_is_named(disk):
    child = os.fork()
    if child == 0:
        os.setresuid(65534, 65534, 65534)
        code = 1
        try:
            with KernelMounter().private(disk.device, "ext4"):
                code = 2
        except MissingRequirementError as error:
            code = 0 if "CAP_SYS_ADMIN" in error.message and error.hint else 3
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_scratch_mount_is_seen_and_is_nosuid_and_nodev(disk, folder):
    point = folder / "a" / "b" / "scratch"
    mount_device(disk.device, str(point), fs_type="ext4")
    mount = next(mount for mount in read_mounts() if mount.point == str(point))
    assert {"nosuid", "nodev", "rw"} <= set(mount.options)
    assert mount.source == disk.device
    assert (point / "file").read_text() == "on the disk"
    unmount(str(point))
    assert point.stat().st_mode & 0o7777 == 0o700
    assert point.parent.stat().st_mode & 0o7777 == 0o755
    remove_point(str(point))
    assert not point.exists()


def test_a_bind_shows_a_folder_read_only_and_not_what_is_mounted_in_it(disk, folder):
    source = folder / "source"
    (source / "inner").mkdir(parents=True)
    (source / "file").write_text("original")
    mount_device(disk.device, str(source / "inner"), fs_type="ext4")
    bind(str(source), str(folder / "view"), read_only=True)
    mount = next(mount for mount in read_mounts() if mount.point == str(folder / "view"))
    assert {"ro", "nosuid", "nodev"} <= set(mount.options)
    with pytest.raises(OSError, match="Read-only"):
        (folder / "view" / "file").write_text("changed")
    assert list((folder / "view" / "inner").iterdir()) == []
    (source / "file").write_text("still writable here")
    assert (folder / "view" / "file").read_text() == "still writable here"


def test_a_writable_bind_writes_through(folder):
    (folder / "source").mkdir()
    bind(str(folder / "source"), str(folder / "view"), read_only=False)
    (folder / "view" / "new").write_text("x")
    assert (folder / "source" / "new").exists()


def test_a_mount_in_use_names_who_holds_it(disk, folder):
    point = folder / "scratch"
    mount_device(disk.device, str(point), fs_type="ext4")
    with subprocess.Popen(["/bin/sleep", "60"], cwd=point) as sleeper:
        try:
            with pytest.raises(InUseError, match=rf"sleep \(pid {sleeper.pid}, working directory\)"):
                unmount(str(point))
        finally:
            sleeper.kill()
    with (point / "file").open(), pytest.raises(InUseError, match="open file file"):
        unmount(str(point))
    (point / "inner").mkdir(exist_ok=True)
    bind("/usr", str(point / "inner"), read_only=True)
    with pytest.raises(InUseError, match="the mount at .*/scratch/inner"):
        unmount(str(point))
    unmount(str(point / "inner"))
    unmount(str(point))


def test_what_is_not_mounted_cannot_be_unmounted(folder):
    with pytest.raises(NotFoundError, match="nothing is mounted"):
        unmount(str(folder))
    with pytest.raises(NotFoundError, match="nothing is mounted"):
        unmount(str(folder / "absent"))


def test_unmount_does_not_follow_a_symlink(disk, folder):
    point = folder / "scratch"
    mount_device(disk.device, str(point), fs_type="ext4")
    (folder / "link").symlink_to(point)
    with pytest.raises(NotFoundError):
        unmount(str(folder / "link"))
    assert (point / "file").exists()


@pytest.mark.parametrize("kind", ["file", "symlink", "full", "mounted", "relative"])
def test_only_an_empty_folder_becomes_a_mount_point(disk, folder, kind):
    point = folder / "point"
    if kind == "file":
        point.write_text("data")
    elif kind == "symlink":
        (folder / "aim").mkdir()
        point.symlink_to(folder / "aim")
    elif kind == "full":
        point.mkdir()
        (point / "data").write_text("data")
    elif kind == "mounted":
        (folder / "empty").mkdir()
        bind(str(folder / "empty"), str(point), read_only=True)
    elif kind == "relative":
        point = Path("relative/point")
    before = read_mounts()
    with pytest.raises(StorageError) as caught:
        mount_device(disk.device, str(point), fs_type="ext4")
    assert caught.value.hint
    assert read_mounts() == before


def test_a_symlink_that_somebody_else_laid_on_the_way_is_not_followed(disk, folder):
    (folder / "private").mkdir()
    (folder / "trap").symlink_to(folder / "private")
    os.lchown(folder / "trap", 65534, 65534)
    with pytest.raises(StorageError, match="another user's symlink"):
        mount_device(disk.device, str(folder / "trap" / "scratch"), fs_type="ext4")
    assert list((folder / "private").iterdir()) == []
    (folder / "ours").symlink_to("private/../private")
    mount_device(disk.device, str(folder / "ours" / "scratch"), fs_type="ext4")
    assert (folder / "private" / "scratch" / "file").exists()


def test_a_failed_mount_leaves_no_folder_that_it_made(folder):
    with pytest.raises(StorageError):
        mount_device("/dev/no-such-device", str(folder / "point"), fs_type="ext4")
    assert not (folder / "point").exists()
    (folder / "theirs").mkdir()
    with pytest.raises(StorageError):
        mount_device("/dev/no-such-device", str(folder / "theirs"), fs_type="ext4")
    assert (folder / "theirs").is_dir()
