"""A selection of `./run measure locks`: all values; in a campaign each two of them that can meet do so in a cell."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from support.load import write_load
from support.matrix.binlogs import Prefix
from support.matrix.cells import Cell, all_cells, fewest_cells, selected_cells
from support.matrix.checking import check
from support.matrix.series import WRITERS, Task, run_site
from support.matrix.sites import running_site
from support.matrix.taking import take
from support.thoroughness import CAMPAIGN

if TYPE_CHECKING:
    from pathlib import Path

# The installed MariaDB's mariadb-binlog is the unpacked one's.
pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "xfs", "ext4", "mariadb-11.8")
SNAPSHOTS = 2
CELLS = selected_cells() if CAMPAIGN else fewest_cells()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, id=cell.id, marks=pytest.mark.needs(cell.server)) for cell in CELLS],
)
def test_snapshots_under_load_are_exact(cell: Cell) -> None:
    """And what must be refused on the same server is."""
    refused = [one for one in all_cells() if one.site == cell.site and one.refusal is not None]
    tasks = [Task(cell=cell, snapshots=SNAPSHOTS), *(Task(cell=one, snapshots=1) for one in refused)]
    results = list(run_site(tasks, None))
    assert [f"{one.cell}: {one.text}" for one in results if one.kind == "failed"] == []
    assert [one.wrong for one in results if one.wrong] == []
    taken = [one for one in results if one.kind == "snapshot"]
    assert [one.position for one in taken] == ["absent" if cell.level == "stopped" else "exact"] * SNAPSHOTS
    assert [one.replay for one in taken] == ["", None]
    assert [one.cell for one in results if one.kind == "refused"] == [one.id for one in refused]
    least = "global-read-lock" if "aria" in cell.engines else "backup-lock"
    wanted = {least if cell.level == "auto" else cell.level}
    if cell.level == "auto" and not cell.other_engines and cell.layout == "one-volume":
        # A lock that is not free at once is done without.
        wanted.add("crash-consistent")
    assert {one.level for one in taken} <= wanted


@pytest.mark.needs("mariadb-10.11")
def test_each_kind_of_wrong_record_is_seen() -> None:
    """The same snapshot is checked again and again, with something else wrong in its record each time."""
    cell = Cell(server="mariadb-10.11", layout="one-volume", engines="innodb+aria+myisam", level="auto")
    with (
        running_site(cell) as site,
        write_load(str(site.scene.server.socket), writers=WRITERS, engines=cell.other_engines, start=False) as load,
    ):
        (taken,) = take(site, cell, load, 1)
        position = taken.manifest.position
        assert position is not None
        ends = transaction_ends(site.logs / position.file)
        here = ends.index(position.offset)
        # By some: a single REPLACE that is applied twice, or not at all, may be made good by the next one.
        earlier, later = (structs.replace(position, offset=ends[here + step]) for step in (-8, 8))
        inside = structs.replace(position, offset=position.offset + 1)
        domain, _, number = position.gtid.rpartition("-")
        ahead = structs.replace(position, gtid=f"{domain}-{int(number) + 1}")
        good = check(site, cell, taken, Prefix(site), replayed=True)
        assert (good.wrong, good.replay) == ([], "")
        for wrong, replayed in ((earlier, True), (later, True), (inside, False), (ahead, False)):
            record = replace(taken, manifest=structs.replace(taken.manifest, position=wrong))
            findings = check(site, cell, record, Prefix(site), replayed=replayed)
            assert findings.position, wrong
            assert findings.invariant == findings.lost == ""
            assert bool(findings.replay) == replayed, wrong
        # Without a lock the copied log may hold a part of a transaction more, but no whole one.
        lockless = replace(cell, level="crash-consistent")
        assert taken.manifest.quiesce is not None
        quiesce = structs.replace(taken.manifest.quiesce, level="crash-consistent")
        record = replace(taken, manifest=structs.replace(taken.manifest, position=earlier, quiesce=quiesce))
        findings = check(site, lockless, record, Prefix(site), replayed=False)
        assert f"holds 8 whole transactions behind {earlier.offset}" in findings.position
        more = tuple(replace(line, aria=line.aria + 2) for line in taken.after)
        lost = check(site, cell, replace(taken, before=more, after=more), Prefix(site), replayed=False)
        assert "writer 7: aria is at" in lost.lost


def transaction_ends(path: Path) -> list[int]:
    """Return the offsets in a MariaDB binary log at which a transaction begins, which are the ends of those before."""
    data, offset, found = path.read_bytes(), 4, []
    while offset < len(data):
        if data[offset + 4] == 162:
            found.append(offset)
        offset += int.from_bytes(data[offset + 9 : offset + 13], "little")
    return [*found, offset]
