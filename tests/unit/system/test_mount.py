"""Errors of mount calls in words, and who holds a mount."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager

import pytest

from snapmgr.contract.errors import MissingRequirementError, StorageError
from snapmgr.contract.records import Mount
from snapmgr.system import mount, mountapi


def _error(number):
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EINVAL, errno.EBUSY, errno.EROFS, errno.EIO])
def test_a_refused_mount_names_what_was_tried_and_what_to_do(number):
    error = mountapi.refused(_error(number), "mount /dev/x at /mnt", log="the kernel said so")
    assert type(error) is StorageError
    assert error.message == f"cannot mount /dev/x at /mnt: {os.strerror(number)} (the kernel said so)"
    assert error.hint


@pytest.mark.parametrize(("number", "word"), [(errno.ENOSYS, "Linux"), (errno.ENODEV, "modprobe")])
def test_what_the_kernel_does_not_have_is_lacking(number, word):
    error = mountapi.refused(_error(number), "mount x")
    assert isinstance(error, MissingRequirementError)
    assert word in error.hint


def test_a_refusal_for_want_of_rights_is_told_from_one_with_all_rights(monkeypatch):
    monkeypatch.setattr(mountapi, "may_mount", lambda: False)
    error = mountapi.refused(_error(errno.EPERM), "mount x")
    assert isinstance(error, MissingRequirementError)
    assert "CAP_SYS_ADMIN" in error.message
    monkeypatch.setattr(mountapi, "may_mount", lambda: True)
    assert type(mountapi.refused(_error(errno.EPERM), "mount x")) is StorageError


def test_a_process_that_uses_a_folder_is_named(tmp_path):
    with (tmp_path / "open-file").open("w"):
        (who,) = mount.holders(str(tmp_path), ())
    assert f"pid {os.getpid()}" in who
    assert "open file open-file" in who
    assert mount.holders(str(tmp_path), ()) == ()


def test_a_folder_with_a_name_that_begins_alike_is_not_in_use(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "ab").mkdir()
    with (tmp_path / "ab" / "file").open("w"):
        assert mount.holders(str(tmp_path / "a"), ()) == ()


def test_a_mount_below_is_named():
    below = Mount(id=2, parent_id=1, device="0:1", root="/", point="/m/x/y", fs_type="tmpfs", source="none")
    beside = Mount(id=3, parent_id=1, device="0:1", root="/", point="/m/xy", fs_type="tmpfs", source="none")
    assert mount.holders("/m/x", (below, beside)) == ("the mount at /m/x/y",)


@pytest.fixture
def mounted(monkeypatch):
    """Return the private mounts that exist, in the order in which they were made, and how many were made."""
    mounts, made = [], []

    @contextmanager
    def new_mount(source, fs_type, options, *, unseen):
        assert unseen
        key = (source, fs_type, *options)
        mounts.append(key)
        made.append(key)
        fd = os.open("/", os.O_PATH | os.O_DIRECTORY)
        try:
            yield fd
        finally:
            os.close(fd)
            mounts.remove(key)

    monkeypatch.setattr(mountapi, "new_mount", new_mount)
    return mounts, made


def test_steps_that_share_have_one_private_mount_of_each_kind(mounted):
    mounts, made = mounted
    mounter = mount.KernelMounter()
    with mounter.sharing():
        with mounter.private("/dev/x", "btrfs", ("ro",)) as first:
            assert os.fstat(first.fd).st_ino == os.stat("/").st_ino
        with mounter.private("/dev/x", "btrfs", ("ro",)) as again:
            assert again is first
        with mounter.private("/dev/x", "btrfs") as writable, mounter.private("/dev/y", "btrfs") as other:
            assert len({first.fd, writable.fd, other.fd}) == 3
        assert mounts == made == [("/dev/x", "btrfs", "ro"), ("/dev/x", "btrfs"), ("/dev/y", "btrfs")]
    assert mounts == []
    for one in (first, writable, other):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(one.fd)
    # Afterwards each is alone again, and the next ones that share have new ones.
    with mounter.private("/dev/x", "btrfs"):
        pass
    with mounter.sharing(), mounter.private("/dev/x", "btrfs"):
        pass
    assert mounts == []
    assert made[3:] == [("/dev/x", "btrfs")] * 2


def test_shared_private_mounts_end_with_an_error_and_are_no_childs(mounted, monkeypatch):
    mounts, made = mounted
    mounter = mount.KernelMounter()

    def hang():
        with mounter.sharing(), mounter.private("/dev/x", "btrfs") as ours:
            pid = os.getpid()
            monkeypatch.setattr(os, "getpid", lambda: pid + 1)  # a helper, which has closed our descriptors
            with mounter.private("/dev/x", "btrfs") as childs:
                assert childs.fd != ours.fd
            assert len(mounts) == 1
            monkeypatch.setattr(os, "getpid", lambda: pid)
            raise StorageError("it hangs")

    with pytest.raises(StorageError):
        hang()
    assert mounts == []
    assert len(made) == 2
