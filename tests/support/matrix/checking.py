"""What is checked of each snapshot: a server on a clone of it against its record, the binary log and the writers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.access.attach import attached, data_path
from support.load import InvariantError, check_invariant
from support.matrix.binlogs import PositionError, checksums, commits_behind, replay
from support.matrix.sites import log_files
from support.server import private_server

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from snapmgr.catalog.manifest import Position
    from support.load import Acknowledged
    from support.matrix.binlogs import Counters, Prefix
    from support.matrix.cells import Cell
    from support.matrix.sites import Site
    from support.matrix.taking import Taken
    from support.server import PrivateServer

_HELD = ""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What is wrong with one snapshot, in words; "" where nothing is."""

    invariant: str = _HELD
    """The load's invariant in the clone."""
    lost: str = _HELD
    """Acknowledged writes that are not in it, or later ones that are."""
    position: str = _HELD
    """The recorded position against the clone's binary log, GTID and counters."""
    replay: str | None = None
    """The clone and what the source wrote afterwards against the source; None: not tried."""

    @property
    def wrong(self) -> list[str]:
        """All of them."""
        return [text for text in (self.invariant, self.lost, self.position, self.replay) if text]


def check(site: Site, cell: Cell, taken: Taken, prefix: Prefix, *, replayed: bool) -> Findings:
    """Start a server on a clone of a snapshot and compare. The writers have ended; snapshots come in their order.

    Args:
        site: where it was taken.
        cell: what was asked for.
        taken: the snapshot.
        prefix: of the source's binary logs; it is advanced to the snapshot's position.
        replayed: whether to apply the rest of the source's binary logs to the clone and compare the tables.
    """
    ctx = site.scene.context()
    manifest = taken.manifest
    with attached(ctx, ctx.catalog.load(manifest.id)) as lease:
        logs = site.copied_logs(lease, manifest)
        where = manifest.position
        file, offset = taken.end or ((where.file, where.offset) if where is not None else ("", 0))
        wrong = _check_record(cell, where, taken.end)
        # Before a server writes there.
        locked = manifest.quiesce is not None and manifest.quiesce.level != "crash-consistent"
        wrong += _check_tail(site, logs, file, offset, locked=locked) if file else []
        wrong += [] if logs is not None or manifest.absent or taken.end else ["binary logs are not recorded as absent"]
        options = site.copy_options(lease, manifest)
        with private_server(data_path(lease), options, install_options=None, kind=cell.server) as copy:
            found, invariant = _check_invariant(copy, cell)
            lost = _check_acknowledged(cell, found, taken) if found else _HELD
            if file and found:
                try:
                    wrong += _check_counters(cell, found, prefix.advance(file, offset))
                    wrong += _check_gtid(copy, where, prefix.gtid, logged=logs is not None)
                except PositionError as error:
                    wrong.append(str(error))
            differs = _replay(site, cell, copy, file, offset) if replayed and file else None
    return Findings(invariant=invariant, lost=lost, position="; ".join(wrong), replay=differs)


def _check_record(cell: Cell, where: Position | None, end: tuple[str, int] | None) -> list[str]:
    if end is None:
        return [] if where is not None else ["no position is recorded"]
    # Of a stopped server none need be recorded, but none may be wrong.
    if where is not None and (where.file, where.offset) != end:
        return [f"recorded is {where.file} {where.offset}, the {cell.level} server's logs ended at {end}"]
    return []


def _check_tail(site: Site, logs: Path | None, file: str, offset: int, *, locked: bool) -> list[str]:
    """Compare the last binary log of the clone with the position."""
    if logs is None:
        return []
    last = log_files(logs)[-1]
    if last.name != file:
        return [f"the clone's last binary log is {last.name}, recorded is {file}"]
    size = last.stat().st_size
    if size == offset:
        return []
    if locked or size < offset:
        return [f"the clone's {file} has {size} bytes, recorded is {offset}"]
    # Without a lock the last transaction may be there in part: only whole ones count.
    more = commits_behind(site.kind, last, offset)
    return [f"the clone's {file} holds {more} whole transactions behind {offset}"] if more else []


def _check_invariant(copy: PrivateServer, cell: Cell) -> tuple[tuple[Acknowledged, ...], str]:
    with copy.connect() as connection:
        try:
            return check_invariant(connection, engines=cell.other_engines), _HELD
        except InvariantError as error:
            return (), str(error)


def _check_acknowledged(cell: Cell, found: Sequence[Acknowledged], taken: Taken) -> str:
    wrong = []
    if len(found) < len(taken.before):
        return f"only {len(found)} of {len(taken.before)} writers are there"
    # A write under way when we looked may have been committed; none is while the server is stopped.
    more = 0 if taken.end else 1
    for writer, (before, here, after) in enumerate(zip(taken.before, found, taken.after, strict=True)):
        for engine in ("innodb", *cell.other_engines):
            least, there, most = (getattr(line, engine) for line in (before, here, after))
            if not least <= there <= most + more:
                wrong.append(f"writer {writer}: {engine} is at {there}, acknowledged were {least} to {most}")
    return "; ".join(wrong)


def _check_counters(cell: Cell, found: Sequence[Acknowledged], prefix: Counters) -> list[str]:
    return [
        f"writer {writer}: {engine} is at {getattr(line, engine)}, the prefix holds {top}"
        for writer, line in enumerate(found)
        for engine in ("innodb", *cell.other_engines)
        if getattr(line, engine) != (top := prefix.get(engine, {}).get(writer, 0))
    ]


def _check_gtid(copy: PrivateServer, where: Position | None, last: str, *, logged: bool) -> list[str]:
    """Compare the recorded GTID, the last one of the prefix, and what the clone's server says."""
    mysql = copy.kind.flavor == "mysql"
    # "UUID:17", the last of one source without holes, is the set "UUID:1-17".
    source, _, number = last.rpartition(":")
    prefix = f"{source}:1-{number}" if mysql and int(number) > 1 else last
    wrong = []
    if where is not None and where.gtid.replace("\n", "") != prefix:
        wrong.append(f"the recorded GTID is {where.gtid!r}, the prefix ends with {prefix!r}")
    if logged:
        ((said,),) = copy.query("SELECT @@gtid_executed" if mysql else "SELECT @@gtid_binlog_pos")
        if str(said).replace("\n", "") != prefix:
            wrong.append(f"the clone's GTID is {said!r}, the prefix ends with {prefix!r}")
    return wrong


def _replay(site: Site, cell: Cell, copy: PrivateServer, file: str, offset: int) -> str:
    try:
        replay(site, copy, file, offset)
    except RuntimeError as error:
        return str(error)
    engines = cell.other_engines
    there, here = checksums(site.scene.server, engines), checksums(copy, engines)
    differing = sorted(name for name in there if there[name] != here[name])
    return f"after the replay these tables differ from the source's: {', '.join(differing)}" if differing else ""
