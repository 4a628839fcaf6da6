"""The kit for backends that copy folders: what it takes for a copy of ours, and how it clones folders."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from snapmgr.contract.errors import BusyError, NotFoundError, StorageError
from snapmgr.contract.records import AttachRecord, Pool
from snapmgr.copystore import copyfolder, removal, store
from snapmgr.copystore.backend import CopyStoreBackend
from snapmgr.copystore.cloning import clone_beside
from snapmgr.copystore.copyfolder import CopyFolder, Mark, Store
from snapmgr.copystore.copying import FolderCopy
from snapmgr.copystore.removal import discard, remove_data
from snapmgr.system import kernel
from snapmgr.system.command import CommandRunner
from snapmgr.system.mount import KernelMounter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.contract.records import NotMine, Target
    from snapmgr.copystore.copyfolder import Folder

_MARK = Mark(kind="snapshot", snapshot_id="one", volume_id="v", origin="/srv/data")
_POOL = Pool(backend="kit", id="pool", hint="")


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Store]:
    store.create(str(tmp_path / "store"), "kit")
    with store.opened(str(tmp_path / "store"), "kit") as made:
        yield made


@pytest.fixture
def folder(opened: Store) -> Iterator[CopyFolder]:
    made = store.begin(opened, "one", _MARK)
    yield made
    os.close(made.fd)


def _described(where: Store, name: str) -> str | None:
    with store.copy_folder(where, name) as found:
        described = store.describe(found, _POOL) if found is not None else None
        return described.kind if described is not None else None


def test_a_backend_that_needs_no_kit_does_not_load_it() -> None:
    loaded = "import sys, snapmgr.api, snapmgr.api.kernel; print([n for n in sys.modules if 'copystore' in n])"
    done = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_states_of_a_copy(opened: Store, folder: CopyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _described(opened, "one") == "debris"
    folder.advance("begun", "made", durable=False)
    assert _described(opened, "one") == "snapshot"
    with monkeypatch.context() as patched:
        patched.setattr(store, "boot_id", lambda: "another boot")
        assert _described(opened, "one") == "debris"
    folder.advance("made", "complete", durable=True)
    with monkeypatch.context() as patched:
        patched.setattr(store, "boot_id", lambda: "another boot")
        assert _described(opened, "one") == "snapshot"


def test_a_copy_that_no_power_cut_harms_outlives_the_boot(opened: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = store.begin(opened, "one", replace(_MARK, volatile=False))
    made.advance("begun", "made", durable=False)
    os.close(made.fd)
    monkeypatch.setattr(store, "boot_id", lambda: "another boot")
    assert _described(opened, "one") == "snapshot"


@pytest.mark.usefixtures("folder")
def test_a_reused_inode_number_makes_it_foreign(opened: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    generation = kernel.generation
    monkeypatch.setattr(kernel, "generation", lambda fd: generation(fd) + 1)
    assert _described(opened, "one") is None


def test_what_another_machine_has_begun_is_left_to_it(tmp_path: Path) -> None:
    store.create(str(tmp_path / "store"), "kit")
    with store.opened(str(tmp_path / "store"), "kit", shared=True) as here:
        there = replace(here, machine="0" * 8)
        made = store.begin(there, "one", _MARK)
        assert (_described(there, "one"), _described(here, "one")) == ("debris", None)
        made.advance("begun", "made", durable=False)
        assert (_described(there, "one"), _described(here, "one")) == ("snapshot", None)
        made.advance("made", "complete", durable=False)
        assert (_described(there, "one"), _described(here, "one")) == ("snapshot", "snapshot")
        os.close(made.fd)


@pytest.mark.usefixtures("folder")
def test_a_folder_that_vanishes_while_it_is_recognised_is_none(opened: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def vanish(dir_fd: int, name: str) -> bytes:
        raise OSError(116, os.strerror(116), f"{dir_fd}/{name}")

    monkeypatch.setattr(store, "read", vanish)
    monkeypatch.setattr(store, "entries", vanish)
    assert _described(opened, "one") is None


def test_a_full_store_lets_a_copy_go(opened: Store, folder: CopyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(folder.path, "data").mkdir()
    rename_new, tries = kernel.rename_new, []

    def full(old: str, new: str, dir_fd: int, new_dir_fd: int | None = None) -> None:
        tries.append(sorted(os.listdir(folder.path)))
        if len(tries) == 1:
            raise OSError(28, os.strerror(28))
        rename_new(old, new, dir_fd, new_dir_fd)

    folder.advance("begun", "complete", durable=False)
    monkeypatch.setattr(kernel, "rename_new", full)
    discard(replace(folder, state="complete"))
    assert tries == [["complete.json", "data"], ["begun.json"]], "its mark says that it is no whole copy any more"
    assert os.listdir(opened.path) == [store.mark_name("kit")]


class _Backend(CopyStoreBackend):
    name = "kit"
    api_version = 1

    def locate(self, target: Target) -> NotMine:
        raise NotImplementedError

    def new_copy(self, source: Folder, target: Folder) -> FolderCopy:
        return _Touch(source, target)


def test_deleting_opens_no_other_snapshot(opened: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(backend="kit", id=opened.path, hint="")
    refs = []
    for name in ("one", "two", "three"):
        made = store.begin(opened, name, replace(_MARK, snapshot_id=name))
        made.advance("begun", "complete", durable=False)
        refs.append(store.reference(made, pool))
        os.close(made.fd)
    half = store.begin(opened, "deleting@half", _MARK)
    os.close(half.fd)
    recognised: list[str] = []
    recognise = store._recognise
    monkeypatch.setattr(
        store, "_recognise", lambda where, fd, name: (recognised.append(name), recognise(where, fd, name))[1]
    )
    backend = _Backend(None, CommandRunner(), KernelMounter())
    backend.delete(refs[1])
    assert sorted(set(recognised)) == ["deleting@half", "two"]
    assert sorted(os.listdir(opened.path)) == ["deleting@half", "one", store.mark_name("kit"), "three"]
    recognised.clear()
    backend.detach(AttachRecord(id="0123456789abcdef", ref=refs[0], writable=True, boot_id="x"))
    assert recognised == ["deleting@half"]
    # What a killed deletion left goes with the next one.
    Path(opened.path, "one").rename(Path(opened.path, "deleting@" + refs[0].native_id.partition(".")[2]))
    backend.delete(refs[0])
    assert sorted(os.listdir(opened.path)) == ["deleting@half", store.mark_name("kit"), "three"]
    # One that was renamed is still found.
    Path(opened.path, "three").rename(Path(opened.path, "renamed"))
    backend.delete(refs[2])
    assert not Path(opened.path, "renamed").exists()


def test_what_became_another_kind_since_it_was_listed_is_removed(tmp_path: Path) -> None:
    (tmp_path / "a/folder/deeper").mkdir(parents=True)
    (tmp_path / "a/file").touch()
    fd = os.open(tmp_path / "a", os.O_RDONLY)
    try:
        removal.remove_entry(fd, "folder", "a/folder", is_folder=False)
        removal.remove_entry(fd, "file", "a/file", is_folder=True)
        removal.remove_entry(fd, "gone", "a/gone", is_folder=False)
    finally:
        os.close(fd)
    assert os.listdir(tmp_path / "a") == []


def test_a_file_of_another_name_stays_in_the_way(opened: Store) -> None:
    Path(opened.path, "two").touch()
    with pytest.raises(StorageError, match="was not made by snapmgr"):
        store.refuse_foreign(opened, "two")
    store.refuse_foreign(opened, "three")


class _Touch(FolderCopy):
    def run(self, deadline: float) -> None:  # noqa: ARG002
        os.mkdir(self.data, 0o500)
        Path(self.data, "file").touch()


class _Fail(FolderCopy):
    def run(self, deadline: float) -> None:  # noqa: ARG002
        Path(self.data, "half").mkdir(parents=True)
        raise StorageError("no more room", hint="make room")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    return tmp_path / "source"


def _clone(source: Path, target: Path, kind: type[FolderCopy] = _Touch) -> None:
    clone_beside(str(source), str(target), kind, remove_data)


def test_clone_of_a_folder_gets_its_name_when_it_is_whole(source: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no more room") as caught:
        _clone(source, tmp_path / "clone", _Fail)
    assert caught.value.hint == "make room"
    assert os.listdir(tmp_path) == ["source"]
    _clone(source, tmp_path / "clone")
    assert sorted(os.listdir(tmp_path)) == ["clone", "source"]
    assert os.listdir(tmp_path / "clone") == ["file"]
    assert (tmp_path / "clone").stat().st_mode & 0o777 == 0o500
    (tmp_path / "clone").chmod(0o700)


def test_clones_that_are_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    for target, why in ((tmp_path / "taken", "exists already"), (source / "inside", "lies inside")):
        with pytest.raises(StorageError, match=why):
            _clone(source, target)
    with pytest.raises(StorageError, match="cannot open"):
        _clone(source, tmp_path / "no" / "such")
    with pytest.raises(NotFoundError):
        _clone(tmp_path / "nothing", tmp_path / "clone")
    assert sorted(os.listdir(tmp_path)) == ["source", "taken"]


def test_leftovers_of_a_killed_clone_are_removed_and_a_living_one_is_left_alone(source: Path, tmp_path: Path) -> None:
    killed = []

    class Killed(FolderCopy):
        def run(self, deadline: float) -> None:  # noqa: ARG002
            killed.append(Path(self.target.path))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _clone(source, tmp_path / "clone", Killed)
    (hidden,) = killed
    (hidden / copyfolder.DATA / "half").mkdir(parents=True)
    (hidden / "cloning").touch()
    fd = os.open(hidden, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(BusyError):
        _clone(source, tmp_path / "clone")
    assert (hidden / copyfolder.DATA / "half").is_dir()
    os.close(fd)
    _clone(source, tmp_path / "clone")
    assert sorted(os.listdir(tmp_path)) == ["clone", "source"]
    (tmp_path / "clone").chmod(0o700)
