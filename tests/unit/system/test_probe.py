"""Whether the records of a run can be written: on file systems that are full, read-only or another user's."""

from __future__ import annotations

import errno
import os
import subprocess
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.contract.errors import StorageError
from snapmgr.system import probe
from snapmgr.system.probe import require_writable

if TYPE_CHECKING:
    from collections.abc import Iterator


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True)


@contextmanager
def _tmpfs(point: Path, mode: int = 0o700) -> Iterator[None]:
    """Mount a file system of 1 MiB with 64 inodes."""
    _mount("-t", "tmpfs", "-o", f"size=1m,nr_inodes=64,mode={mode:o}", "snapmgr-test", point)
    try:
        yield
    finally:
        subprocess.run(["umount", point], check=True)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A small file system, mounted at the state directory."""
    point = tmp_path / "state"
    point.mkdir()
    with _tmpfs(point):
        yield point


def _fill(folder: Path, keep_bytes: int = 0) -> None:
    room = os.statvfs(folder)
    (folder / "fill").write_bytes(bytes(room.f_bfree * room.f_frsize - keep_bytes))


def _problems(run, *command):
    """Return what doctor or status says about the state directory, and the exit status."""
    code, out, _ = run(*command)
    return code, [line for line in out.splitlines() if "cannot write to" in line or "too little is free" in line]


def test_nothing_is_left_and_missing_folders_are_no_problem(tmp_path):
    before = tmp_path.stat().st_mtime_ns
    require_writable(tmp_path)
    require_writable(tmp_path / "not" / "yet")
    assert (list(tmp_path.iterdir()), tmp_path.stat().st_mtime_ns) == ([], before)


@pytest.mark.needs("root")
@pytest.mark.parametrize(("keep_bytes", "fits"), [(0, False), (60 << 10, False), (64 << 10, True)])
def test_room_for_a_manifest(small, keep_bytes, fits):
    _fill(small, keep_bytes)
    if fits:
        require_writable(small)
        return
    with pytest.raises(StorageError, match=rf"cannot write to {small}: No space left on device \(free: ") as caught:
        require_writable(small / "snapshots")
    assert caught.value.hint == "make room on its file system"


@pytest.mark.needs("root")
def test_too_few_inodes(small):
    for number in range(os.statvfs(small).f_ffree - 15):
        (small / str(number)).touch()
    with pytest.raises(StorageError, match=rf"too little is free in {small} .*\(free: 1.0 MiB and 15 inodes\)"):
        require_writable(small)
    (small / "0").unlink()
    require_writable(small)


@pytest.mark.needs("root")
def test_read_only(small):
    _mount("-o", "remount,ro", small)
    with pytest.raises(StorageError, match=f"cannot write to {small}: Read-only file system$") as caught:
        require_writable(small)
    assert "mount its file system writable" in (caught.value.hint or "")


@pytest.mark.needs("root")
def test_a_user_who_may_only_read_is_told_what_is_free():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        with _tmpfs(folder, 0o755):
            os.seteuid(65534)
            try:
                require_writable(folder)
                os.seteuid(0)
                _fill(folder)
                os.seteuid(65534)
                with pytest.raises(StorageError, match=rf"too little is free in {folder} .*\(free: 0 B and 62"):
                    require_writable(folder)
            finally:
                os.seteuid(0)


@pytest.mark.parametrize("tmpfile", [True, False])
def test_a_quota_and_a_file_system_without_unnamed_files(tmp_path, monkeypatch, tmpfile):
    real = os.open

    def open_named(path, flags, *rest, **more):
        if not tmpfile and flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", open_named)
    require_writable(tmp_path)

    def exceed(*_):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "posix_fallocate", exceed)
    with pytest.raises(StorageError, match="Disk quota exceeded") as caught:
        require_writable(tmp_path)
    assert caught.value.hint == "make room on its file system, or raise the quota"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.needs("root")
def test_doctor_and_status_say_it_before_a_backup_fails(small, run, catalog):
    assert catalog.path == small
    assert _problems(run, "doctor")[1] == _problems(run, "status")[1] == []
    _fill(small)
    for command in (("doctor",), ("doctor", "nightly"), ("status",)):
        code, said = _problems(run, *command)
        assert code == 1
        assert f"cannot write to {small}: No space left on device" in said[0]
    assert said[0].startswith("PROBLEM: nightly: the next backup fails: ")


@pytest.mark.needs("root")
def test_doctor_names_a_scratch_directory_that_is_full(small, run, config):
    config.write_text(config.read_text().replace("/scratch", "/state/scratch").replace('/state"', '/elsewhere"'))
    _fill(small)
    assert [line.split()[:3] for line in _problems(run, "doctor")[1]] == [["problem", "state", f"{small}/scratch"]]


def test_what_has_just_answered_is_not_asked_again_and_later_it_is(tmp_path, monkeypatch):
    probe._answered.clear()
    asked = []
    start = probe._start
    monkeypatch.setattr(probe, "_start", lambda path, *, changing: asked.append(path) or start(path, changing=changing))
    (tmp_path / "below").mkdir()
    for path in (tmp_path, tmp_path / "below", tmp_path / "missing"):
        probe.require_answer(str(path))
    assert asked == [str(tmp_path)]
    monkeypatch.setattr(probe, "_ASK_AGAIN_S", 0.0)
    probe.require_answer(str(tmp_path))
    assert len(asked) == 2
    # One that hangs has not answered.
    monkeypatch.setattr(probe, "_answered", {})
    monkeypatch.setattr(probe, "ANSWER_S", 0.0)
    monkeypatch.setattr(os, "waitpid", lambda *_: (0, 0))
    for _ in range(2):
        with pytest.raises(StorageError, match="did not answer"):
            probe.require_answer(str(tmp_path))
    assert (probe._answered, len(asked)) == ({}, 3)
    probe._hanging.clear()
