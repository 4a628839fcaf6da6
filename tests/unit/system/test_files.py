"""Replacing several of our files with few flushes."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest

from snapmgr.contract.errors import NoRoomError
from snapmgr.system import files, kernel
from snapmgr.system.files import write_files

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(name="paths")
def _paths(tmp_path: Path) -> list[Path]:
    found = [tmp_path / str(number) / "manifest.json" for number in range(5)]
    for path in found:
        path.parent.mkdir()
        path.write_text("old")
    return found


@pytest.fixture(name="calls")
def _calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    def noted(where: object, name: str) -> None:
        call = getattr(where, name)

        def note(*arguments: object, **options: object) -> object:
            calls.append(name)
            return call(*arguments, **options)

        monkeypatch.setattr(where, name, note)

    noted(kernel, "sync_file_system")
    noted(os, "fsync")
    noted(os, "rename")
    return calls


def _contents(paths: list[Path]) -> list[str]:
    # Nothing else is left beside them.
    return [path.read_text() for path in paths for _ in path.parent.iterdir()]


def test_many_are_on_disk_before_the_first_is_renamed_and_renamed_on_disk_at_the_end(
    paths: list[Path], calls: list[str]
) -> None:
    assert write_files(dict.fromkeys(paths, b"new")) == {}
    assert _contents(paths) == ["new"] * 5
    assert [call for call in calls if call != "rename"] == ["sync_file_system", "sync_file_system"]
    assert calls[0] == calls[-1] == "sync_file_system"
    assert {path.stat().st_mode & 0o777 for path in paths} == {0o600}


@pytest.mark.parametrize("why", ["few", "FUSE"])
def test_few_files_and_those_on_fuse_are_flushed_one_by_one(
    paths: list[Path], calls: list[str], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "FUSE":
        monkeypatch.setattr(kernel, "_SYNCED_WHOLE", frozenset())
    else:
        paths = paths[:2]
    assert write_files(dict.fromkeys(paths, b"new")) == {}
    assert _contents(paths) == ["new"] * len(paths)
    assert calls.count("sync_file_system") == 0
    assert calls.count("fsync") == 2 * len(paths)


def test_one_that_cannot_be_written_keeps_its_content_and_the_others_are_written(paths: list[Path]) -> None:
    paths[1].parent.joinpath(f".manifest.json.{os.getpid()}").mkdir()
    paths[3].unlink()
    paths[3].mkdir()
    errors = write_files(dict.fromkeys(paths, b"new"))
    assert list(errors) == [paths[1], paths[3]]
    assert [path.read_text() for path in paths if path != paths[3]] == ["new", "old", "new", "new"]
    assert os.listdir(paths[3].parent) == ["manifest.json"]


@pytest.mark.parametrize("failing", [1, 2])
def test_without_the_flush_none_counts_as_written(
    paths: list[Path], monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    calls = []

    def fail(fd: int) -> None:
        calls.append(fd)
        if len(calls) == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(kernel, "sync_file_system", fail)
    errors = write_files(dict.fromkeys(paths, b"new"))
    assert list(errors) == paths
    assert all(isinstance(error, NoRoomError) for error in errors.values())
    assert _contents(paths) == ["old" if failing == 1 else "new"] * 5


def test_the_kernels_disk_file_systems_are_flushed_as_a_whole(tmp_path: Path) -> None:
    with files._opened(tmp_path) as fd:
        assert kernel.syncs_as_a_whole(fd)
    fd = os.open("/proc", os.O_RDONLY)
    assert not kernel.syncs_as_a_whole(fd)
    os.close(fd)
