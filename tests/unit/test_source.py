"""Which volumes hold a source and all its places; the backend is a table of what is where."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from snapmgr.contract.records import NotMine, Pool, Volume
from snapmgr.mysql.datadir.layout import DataPlace
from snapmgr.source.volumes import SourceNeeds, VolumeShare, locate_all, name_excluded

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
    """What `locate_all` needs of a context."""

    runner: Any = None


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
