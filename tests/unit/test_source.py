"""Which volumes hold a source and all its places; the backend is a table of what is where."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from snapmgr.contract.errors import ConfigError, MissingRequirementError, NotQuiescedError, SnapmgrError, StorageError
from snapmgr.contract.records import Capabilities, NotMine, Pool, Volume
from snapmgr.mysql.datadir.layout import DataPlace
from snapmgr.source.volumes import SourceNeeds, VolumeShare, choose_backend, locate_all, name_excluded

if TYPE_CHECKING:
    from pathlib import Path

    from snapmgr.contract.records import Target


@dataclass
class Table:
    """A backend that knows some folders as roots of volumes: the innermost one above a target holds it."""

    roots: dict[str, str]
    excluded: dict[str, tuple[str, ...]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    def locate(self, target: Target) -> Volume | NotMine:
        self.asked.append(target.path)
        above = [root for root in self.roots if target.path == root or target.path.startswith(root + "/")]
        if not above:
            return NotMine(reason="not mine")
        root = max(above, key=len)
        return Volume(
            backend="table",
            id=self.roots[root],
            pool=Pool(backend="table", id="p", hint="p"),
            path=root,
            subpath=os.path.relpath(target.path, root).removeprefix("."),
            excluded=self.excluded.get(root, ()),
        )


@dataclass
class Surroundings:
    """What `locate_all` and `choose_backend` need of a context."""

    runner: Any = None
    backends: dict[str, Any] = field(default_factory=dict)
    lacking: tuple[str, ...] = ()

    def backend(self, name: str) -> Any:
        if name in self.lacking:
            raise MissingRequirementError(f"{name} lacks its library", hint=f"install {name}'s library")
        return self.backends[name]

    def unchecked_backend(self, name: str) -> Any:
        return self.backends[name]


def locate(table: Table, path: Path, *places: Path) -> tuple[VolumeShare, ...] | NotMine:
    for folder in (path, *places):
        folder.mkdir(parents=True, exist_ok=True)
    wanted = SourceNeeds(path=str(path), places=tuple(DataPlace(what="log", path=str(place)) for place in places))
    taken = locate_all(Surroundings(), table, wanted)  # type: ignore[arg-type]
    return taken if isinstance(taken, NotMine) else taken.shares


def shown(shares: tuple[VolumeShare, ...] | NotMine) -> list[tuple[str, dict[str, str]]]:
    assert not isinstance(shares, NotMine)
    return [(share.volume.id, share.places) for share in shares]


def test_all_in_one_volume(tmp_path: Path) -> None:
    data, log = tmp_path / "v" / "data", tmp_path / "v" / "log"
    table = Table({str(tmp_path / "v"): "1"})
    assert shown(locate(table, data, log)) == [("1", {str(data): "data", str(log): "log"})]
    # What a volume's path covers need not be asked for: a walk through a file system may be slow.
    assert table.asked == [str(data)]


def test_one_share_for_each_volume_and_the_sources_first(tmp_path: Path) -> None:
    data, redo, undo = tmp_path / "z", tmp_path / "a", tmp_path / "a" / "undo"
    table = Table({str(data): "d", str(redo): "r"})
    assert shown(locate(table, data, undo, redo)) == [("d", {str(data): ""}), ("r", {str(redo): "", str(undo): "undo"})]


def test_what_a_volume_leaves_out_is_of_another_one_and_then_not_excluded(tmp_path: Path) -> None:
    data, inner, other = tmp_path / "d", tmp_path / "d" / "redo", tmp_path / "d" / "other"
    table = Table({str(data): "d", str(inner): "r"}, excluded={str(data): (str(inner), str(other))})
    shares = locate(table, data, inner)
    assert shown(shares) == [("d", {str(data): ""}), ("r", {str(inner): ""})]
    assert not isinstance(shares, NotMine)
    assert name_excluded(shares) == (str(other),)


def test_the_same_volume_by_another_path(tmp_path: Path) -> None:
    data, bound = tmp_path / "d", tmp_path / "bound"
    assert shown(locate(Table({str(data): "1", str(bound): "1"}), data, bound)) == [
        ("1", {str(data): "", str(bound): ""})
    ]


class FolderTable(Table):
    """Each folder is a volume of its own, as where folders are copied."""

    def locate(self, target: Target) -> Volume | NotMine:
        self.roots[target.path] = target.path
        return super().locate(target)


def test_a_folder_above_the_source_is_not_taken(tmp_path: Path) -> None:
    refusal = locate(FolderTable({}), tmp_path / "srv" / "d", tmp_path / "srv")
    assert isinstance(refusal, NotMine)
    assert "holds the datadir" in refusal.reason


@pytest.mark.parametrize("whose", ["source", "place"])
def test_a_folder_of_no_volume_is_named(tmp_path: Path, whose: str) -> None:
    data, log = tmp_path / "d", tmp_path / "log"
    refusal = locate(Table({} if whose == "source" else {str(data): "1"}), data, log)
    assert isinstance(refusal, NotMine)
    assert whose == "source" or str(log) in refusal.reason


@dataclass
class Storage(Table):
    """A backend that holds the path of its test, or says why it does not."""

    name: str = ""
    atomicity: str = "volume"
    why_not: NotMine | None = None

    def locate(self, target: Target) -> Volume | NotMine:
        return self.why_not or super().locate(target)

    def capabilities(self, _volumes: object) -> Capabilities:
        return Capabilities(atomicity=self.atomicity, clone="native", survives_origin=True)  # type: ignore[arg-type]


def refusal(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    why_not: dict[str, NotMine | None],
    *,
    lacking: tuple[str, ...] = (),
    one_instant: bool = True,
    job: str = "auto",
) -> SnapmgrError:
    """What a user reads if the backends refuse like this; None is a backend that copies the path file by file."""
    backends = {
        name: Storage({str(path): "1"}, name=name, atomicity="file", why_not=reason) for name, reason in why_not.items()
    }
    monkeypatch.setattr("snapmgr.source.volumes.backend_names", lambda: tuple(backends))
    with pytest.raises(SnapmgrError) as caught:
        choose_backend(
            Surroundings(backends=backends, lacking=lacking),  # type: ignore[arg-type]
            Named(backend=job),  # type: ignore[arg-type]
            SourceNeeds(path=str(path), one_instant=one_instant),
        )
    return caught.value


@dataclass
class Named:
    name: str = ""
    backend: str = ""


ELSEWHERE = NotMine(reason="it is of another kind", foreign=True)
BUSY = NotMine(reason="a merge is running", hint="wait for it")


@pytest.mark.parametrize(
    ("one_instant", "hint", "not_in_hint"),
    [(True, ("btrfs", "physical", "would not help"), "stop the server"), (False, ("XFS", "allow_plain_copy"), "stop")],
)
def test_storage_without_snapshots_is_named_with_what_helps(tmp_path, monkeypatch, one_instant, hint, not_in_hint):
    kinds = {"btrfs": ELSEWHERE, "lvm": NotMine(reason="it is on no volume", foreign=True), "juicefs": ELSEWHERE}
    # A library that is missing has nothing to do with it.
    error = refusal(tmp_path, monkeypatch, kinds, lacking=("btrfs", "juicefs"), one_instant=one_instant)
    assert isinstance(error, StorageError)
    assert f"no backend can snapshot {tmp_path}: it is on " in error.message
    assert "another kind" not in error.message
    assert not [word for word in ("btrfs:", "lvm", "juicefs", "library") if word in error.message]
    assert [word for word in hint if word not in str(error.hint)] == []
    assert not_in_hint not in str(error.hint)


@pytest.mark.parametrize(
    ("why_not", "lacking", "kind", "message", "hint"),
    [
        ({"a": ELSEWHERE, "b": BUSY, "c": ELSEWHERE}, (), StorageError, "by b: a merge is running", "wait for it"),
        ({"a": BUSY, "b": None}, (), StorageError, "by a: a merge is running", "wait for it"),
        ({"a": ELSEWHERE, "b": None}, (), NotQuiescedError, "b copies", "freeze-process"),
        ({"a": None, "b": None}, ("a",), MissingRequirementError, "by a: a lacks its library", "install a's"),
        ({"a": ELSEWHERE, "b": BUSY}, ("a",), StorageError, "by b: a merge is running", "wait for it"),
        (
            {"a": BUSY, "b": NotMine(reason="no place")},
            (),
            StorageError,
            "a: a merge is running (wait for it); b: no place",
            "",
        ),
    ],
)
def test_the_nearest_backend_is_named(tmp_path, monkeypatch, why_not, lacking, kind, message, hint):
    error = refusal(tmp_path, monkeypatch, why_not, lacking=lacking)
    assert isinstance(error, kind)
    assert message in error.message
    assert hint in str(error.hint)
    assert "another kind" not in error.message


def test_a_backend_that_the_job_names_says_that_the_storage_is_not_its_own(tmp_path, monkeypatch):
    error = refusal(tmp_path, monkeypatch, {"a": ELSEWHERE, "b": None}, lacking=("a",), job="a")
    assert error.message == f"cannot snapshot {tmp_path} by a: it is of another kind"


def test_a_mistake_in_the_configuration_is_raised_as_it_is(tmp_path, monkeypatch):
    def mistaken(_self: Storage, _target: Target) -> Volume:
        raise ConfigError("backend.a.folder: no")

    monkeypatch.setattr(Storage, "locate", mistaken)
    assert refusal(tmp_path, monkeypatch, {"a": None, "b": None}).message == "backend.a.folder: no"
