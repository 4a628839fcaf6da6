"""The cells of the matrix: server × level × engines × layout, what is refused of it, and a selection by pairs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product
from typing import TYPE_CHECKING

from support.kinds import KINDS

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence
    from collections.abc import Set as AbstractSet

SERVERS = tuple(KINDS)
LEVELS = ("auto", "global-read-lock", "freeze-process", "crash-consistent", "stopped")
ENGINES = ("innodb", "innodb+myisam", "innodb+aria+myisam")
LAYOUTS = {
    "one-volume": "all on one btrfs subvolume",
    "binlog-member": "binary log on another subvolume, a member of the snapshot",
    "binlog-absent": "binary log on ext4, which cannot be snapshotted: recorded as absent",
    "reflink": "all on one XFS, copied file by file",
    "two-volumes": "data on one XFS, redo log on another",
}
BARE_LAYOUTS = ("one-volume", "binlog-member", "binlog-absent")
"""Those whose data are one btrfs subvolume, of which a bare snapshot call can be made."""
_LEAST_EACH = 5
_LEAST_IN_ALL = 500
_INEXACT = "no position is exact"
_BY_FILE = r"file by file"
_OTHER_ENGINES = r"tables of .*(MyISAM|Aria)"
_LOGS_APART = r"not on the volume of the data"
_NO_REDO = r"redo log is not in"


@dataclass(frozen=True, kw_only=True, order=True)
class Cell:
    """One combination; each value is one of the tuples above."""

    server: str
    layout: str
    engines: str
    level: str

    @property
    def id(self) -> str:
        """SERVER/LEVEL/ENGINES/LAYOUT."""
        return "/".join(self.values)

    @property
    def values(self) -> tuple[str, str, str, str]:
        """Server, level, engines and layout."""
        return self.server, self.level, self.engines, self.layout

    @property
    def site(self) -> tuple[str, str, str]:
        """Server, layout and engines: cells that agree in these can share a running server."""
        return self.server, self.layout, self.engines

    @property
    def other_engines(self) -> tuple[str, ...]:
        """Engines beside InnoDB, as `support.load` names them."""
        return tuple(self.engines.split("+")[1:])

    @property
    def refusal(self) -> str | None:
        """A pattern of the reason for which snapmgr must refuse it; None if it must take snapshots."""
        still = self.level in ("freeze-process", "stopped")
        if self.layout == "two-volumes" and self.level == "stopped":
            return _NO_REDO
        if self.layout in ("reflink", "two-volumes"):
            return None if still else _BY_FILE
        if self.level == "backup-lock" and "aria" in self.other_engines and self.server.startswith("mariadb"):
            return _INEXACT
        if self.level != "crash-consistent":
            return None
        reasons = [_OTHER_ENGINES] if self.other_engines else []
        if self.layout != "one-volume":
            reasons.append(_LOGS_APART)
        return "|".join(reasons) or None


def default_snapshots(cells: Sequence[Cell]) -> int:
    """Return how many snapshots of each cell make 500 or more of the whole matrix on the servers of `cells`."""
    servers = {cell.server for cell in cells}
    taken = sum(cell.server in servers for cell in taken_cells())
    return max(_LEAST_EACH, -(-_LEAST_IN_ALL // max(taken, 1)))


def all_cells() -> list[Cell]:
    """Return every cell, the refused ones too; those of one site follow each other."""
    cells = [
        Cell(server=server, layout=layout, engines=engines, level=level)
        for server, layout, engines, level in product(SERVERS, LAYOUTS, ENGINES, LEVELS)
    ]
    return [cell for cell in cells if set(cell.other_engines) <= set(KINDS[cell.server].engines)]


def taken_cells() -> list[Cell]:
    """Return the cells in which snapshots are taken."""
    return [cell for cell in all_cells() if cell.refusal is None]


Pair = tuple[tuple[int, str], tuple[int, str]]


def pairs_of(row: Sequence[str]) -> set[Pair]:
    """Return every two of a row's values, each with its column."""
    return set(combinations(enumerate(row), 2))


def cover_pairs(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the numbers of a few rows in which each pair of values that is in any row is in one at least."""
    return _cover([pairs_of(row) for row in rows])


def _cover(aspects: Sequence[AbstractSet[Hashable]]) -> list[int]:
    """Given what each row shows, return the numbers of a few that together show all of it.

    Greedy: always the row with the most that is not shown yet, the first of equals.
    """
    wanted = set().union(*aspects)
    chosen: list[int] = []
    while wanted:
        best = max(range(len(aspects)), key=lambda number: len(aspects[number] & wanted))
        chosen.append(best)
        wanted -= aspects[best]
    return sorted(chosen)


def selected_cells() -> list[Cell]:
    """Return a selection of `taken_cells` in which every two values that can meet do."""
    cells = taken_cells()
    return [cells[number] for number in cover_pairs([cell.values for cell in cells])]


def fewest_cells() -> list[Cell]:
    """Return a smaller one: every level on MariaDB and on MySQL, every engine on every server, and every layout."""

    def aspects(cell: Cell) -> set[Hashable]:
        flavor = KINDS[cell.server].flavor
        return {(flavor, cell.level), (cell.server, cell.engines), cell.layout}

    cells = taken_cells()
    return [cells[number] for number in _cover([aspects(cell) for cell in cells])]
