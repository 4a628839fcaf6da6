from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from snapmgr.contract.errors import NotFoundError, StorageError
from snapmgr.physical import seal as module
from snapmgr.physical.seal import compare, seal


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    folder = tmp_path / "backup"
    (folder / "db" / "deep").mkdir(parents=True)
    (folder / "ibdata1").write_bytes(b"x" * 5000)
    (folder / "db" / "t.ibd").write_bytes(b"y" * 70000)
    (folder / "db" / "deep" / "empty").touch()
    (folder / "link").symlink_to("ibdata1")
    (folder / os.fsdecode(b"odd\xff\n name")).write_text("z")
    return folder


def test_a_sealed_folder_is_counted_and_equals_itself(backup):
    sealed = seal(str(backup), checksums=True)
    assert (sealed.files, sealed.size_bytes) == (4, 75001)
    assert compare(str(backup), sealed, contents=True) == ()
    assert seal(str(backup), checksums=True) == sealed
    assert seal(str(backup)).digest != sealed.digest


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda folder: (folder / "db" / "t.ibd").unlink(), {"db/t.ibd is gone"}),
        (lambda folder: (folder / "db" / "new").touch(), {"db/new is new"}),
        (lambda folder: (folder / "ibdata1").write_bytes(b"x" * 5001), {"ibdata1 changed: size, time"}),
        (lambda folder: os.utime(folder / "db" / "t.ibd", (1, 1)), {"db/t.ibd changed: time, time of change"}),
        (lambda folder: (folder / "ibdata1").chmod(0o600), {"ibdata1 changed: type or mode"}),
        (lambda folder: (folder / "db" / "deep" / "empty").rename(folder / "db" / "other"), {"db/deep/empty is gone"}),
    ],
)
def test_every_change_is_told_with_its_name(backup, change, told):
    (backup / "ibdata1").chmod(0o640)
    sealed = seal(str(backup))
    change(backup)
    found = compare(str(backup), sealed)
    assert all(any(one.startswith(text) for one in found) for text in told), found


def test_a_file_that_was_exchanged_for_an_equal_one_is_seen(backup):
    sealed = seal(str(backup))
    shutil.copy2(backup / "ibdata1", backup / "copy")
    os.replace(backup / "copy", backup / "ibdata1")
    assert any("ibdata1 changed: inode" in one for one in compare(str(backup), sealed))


def test_contents_that_changed_without_a_trace_are_seen_by_their_checksums_alone(backup, tmp_path):
    sealed = seal(str(backup), checksums=True)
    copy = tmp_path / "copy"
    shutil.copytree(backup, copy, symlinks=True)
    assert compare(str(copy), sealed, copy=True, contents=True) == ()
    before = (copy / "db" / "t.ibd").stat()
    with (copy / "db" / "t.ibd").open("r+b") as file:
        file.write(b"!")
    os.utime(copy / "db" / "t.ibd", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert compare(str(copy), sealed, copy=True) == ()
    assert compare(str(copy), sealed, copy=True, contents=True) == ("db/t.ibd changed: content",)


def test_a_symlinks_aim_is_part_of_it(backup, tmp_path):
    sealed = seal(str(backup))
    copy = tmp_path / "copy"
    shutil.copytree(backup, copy, symlinks=True)
    info = (copy / "link").lstat()
    (copy / "link").unlink()
    (copy / "link").symlink_to("db")
    os.utime(copy / "link", ns=(info.st_atime_ns, info.st_mtime_ns), follow_symlinks=False)
    assert any(one.startswith("link changed:") and "content" in one for one in compare(str(copy), sealed, copy=True))


def test_every_file_and_folder_is_synced_and_the_one_above(backup, monkeypatch):
    synced: list[str] = []
    monkeypatch.setattr(module.os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    told: list[tuple[int, int]] = []
    seal(str(backup), progress=lambda done, total: told.append((done, total)))
    wanted = [backup.parent, backup, *(path for path in backup.rglob("*") if not path.is_symlink())]
    assert sorted(synced) == sorted(map(str, wanted))
    assert all(done <= total == len(wanted) - 1 for done, total in told)


def test_storage_that_does_not_take_the_data_is_told_with_the_file(backup, monkeypatch):
    def fsync(fd: int) -> None:
        if os.readlink(f"/proc/self/fd/{fd}").endswith("t.ibd"):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(module.os, "fsync", fsync)
    with pytest.raises(StorageError, match="failed to write .*/db/t.ibd: Input/output error"):
        seal(str(backup))


def test_what_no_backup_holds_is_refused(backup):
    os.mkfifo(backup / "fifo")
    with pytest.raises(StorageError, match="fifo is neither file, folder nor symlink"):
        seal(str(backup))
    with pytest.raises(NotFoundError):
        seal(str(backup / "none"))


def test_symlinks_to_folders_are_not_entered(backup, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (backup / "way").symlink_to(outside)
    sealed = seal(str(backup))
    (outside / "new").touch()
    assert compare(str(backup), sealed) == ()
