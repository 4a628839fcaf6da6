"""Errors of mount calls in words, and who holds a mount."""

from __future__ import annotations

import errno
import os

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
