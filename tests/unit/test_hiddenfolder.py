"""A hidden folder: recognised by its record, moved up without replacing anything, removed with its record last."""

from __future__ import annotations

import errno
import os
import stat

import pytest

from snapmgr.tree import hiddenfolder
from snapmgr.tree.hiddenfolder import lock, make_folder, make_hidden, move_up, read_record, remove_hidden, write_record
from snapmgr.tree.walk import FOLDER_FLAGS


@pytest.fixture(name="parent_fd")
def _parent_fd(tmp_path):
    fd = os.open(tmp_path, FOLDER_FLAGS)
    yield fd
    os.close(fd)


@pytest.fixture(name="fd")
def _fd(parent_fd):
    fd = make_hidden(parent_fd, ".hidden")
    yield fd
    os.close(fd)


def test_record_tells_whose_it_is(tmp_path, fd):
    assert stat.S_IMODE((tmp_path / ".hidden").stat().st_mode) == 0o700
    assert read_record(fd) == b""
    write_record(fd, b"first")
    write_record(fd, b"second")
    assert read_record(fd) == b"second"
    assert os.listdir(fd) == ["record.json"]
    # Without a record, and with something in it, it is somebody else's; so is one whose record is no file.
    os.unlink("record.json", dir_fd=fd)
    (tmp_path / ".hidden" / "precious").touch()
    assert read_record(fd) is None
    os.mkfifo(tmp_path / ".hidden" / "record.json")
    assert read_record(fd) is None


def test_killed_while_it_wrote_its_record_it_is_ours(tmp_path, fd):
    (tmp_path / ".hidden" / f".record.json.{os.getpid()}").touch()
    assert read_record(fd) == b""


@pytest.mark.parametrize("number", [None, errno.EINVAL, errno.ENOSYS])
def test_nothing_is_replaced_also_where_the_file_system_cannot_promise_it(tmp_path, parent_fd, fd, monkeypatch, number):
    def refuse(*_arguments):
        raise OSError(number, os.strerror(number))

    if number is not None:
        monkeypatch.setattr(hiddenfolder, "rename_new", refuse)
    os.close(make_folder(fd, "tree"))
    os.close(make_folder(fd, "other"))
    (tmp_path / "other").touch()
    move_up(fd, "tree", parent_fd)
    with pytest.raises(FileExistsError):
        move_up(fd, "other", parent_fd)
    assert (tmp_path / "tree").is_dir()
    assert (tmp_path / "other").is_file()
    assert os.listdir(fd) == ["other"]


def test_any_other_error_is_no_reason_to_rename_plainly(parent_fd, fd, monkeypatch):
    def fail(*_arguments):
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(hiddenfolder, "rename_new", fail)
    os.close(make_folder(fd, "tree"))
    with pytest.raises(OSError, match="broken"):
        move_up(fd, "tree", parent_fd)
    assert os.listdir(fd) == ["tree"]


def test_it_is_removed_with_its_record_last(tmp_path, parent_fd, fd, monkeypatch):
    write_record(fd, b"ours")
    os.close(make_folder(fd, "tree"))
    (tmp_path / ".hidden" / "tree" / "file").touch()
    (tmp_path / ".hidden" / "file").touch()
    (tmp_path / ".hidden" / "link").symlink_to(tmp_path)

    def stop(_parent_fd, name):
        assert name == ".hidden"
        raise OSError(errno.EIO, "stopped")

    real = hiddenfolder.remove
    monkeypatch.setattr(hiddenfolder, "remove", lambda at, name: real(at, name) if at != parent_fd else stop(at, name))
    with pytest.raises(OSError, match="stopped"):
        remove_hidden(parent_fd, ".hidden")
    assert os.listdir(fd) == ["record.json"]
    monkeypatch.setattr(hiddenfolder, "remove", real)
    remove_hidden(parent_fd, ".hidden")
    assert os.listdir(tmp_path) == []
    remove_hidden(parent_fd, ".hidden")


def test_lock_is_for_one(tmp_path, fd):
    assert lock(fd)
    other = os.open(tmp_path / ".hidden", FOLDER_FLAGS)
    try:
        assert not lock(other)
    finally:
        os.close(other)
