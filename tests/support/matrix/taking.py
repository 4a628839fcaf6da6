"""Snapshots of one cell under load, and the attempts that must be refused."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from snapmgr.backup.run import backup
from snapmgr.contract.errors import SnapmgrError
from support.bare import bare_snapshot

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import Manifest
    from support.load import Acknowledged, WriteLoad
    from support.matrix.cells import Cell
    from support.matrix.sites import Site

# What began to wait in a backup has come back by then.
_REST_S = 0.1
_WARM_UP_WRITES = 5


class UnexpectedError(AssertionError):
    """snapmgr took what it must refuse, or refused it for another reason."""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A snapshot that is to be checked."""

    manifest: Manifest
    before: tuple[Acknowledged, ...]
    """What was acknowledged before the backup began."""
    after: tuple[Acknowledged, ...]
    end: tuple[str, int] | None
    """The end of the binary logs of a server that was stopped."""
    times: dict[str, float] = field(default_factory=dict)
    """Seconds: "wait", "hold", "call", "frozen", "backup", "stall" (the writers' worst), "bare", "bare_stall"."""


def take(site: Site, cell: Cell, load: WriteLoad, count: int) -> list[Taken]:
    """Take `count` snapshots while the writers write; they have ended when this returns.

    Where the data are a btrfs subvolume, each second step is bare snapshot calls under the same load. For the level
    "stopped" the writers pause and the server is stopped meanwhile.
    """
    site.configure(cell.level)
    if cell.level == "stopped":
        return [_take_stopped(site, load) for _ in range(count)]
    taken = []
    load.start()
    load.warm_up(_WARM_UP_WRITES)
    for number in range(count):
        # In turns, so that none is always the first after the other.
        bare = _take_bare(site, load) if number % 2 else {}
        one = _take_running(site, load)
        one.times.update(bare or _take_bare(site, load))
        taken.append(one)
        load.check_alive()
    load.stop()
    return taken


def _take_running(site: Site, load: WriteLoad) -> Taken:
    ctx = site.scene.context()
    before = load.acknowledged()
    start = time.monotonic_ns()
    manifest = backup(ctx, ctx.config.job("demo"))
    end = time.monotonic_ns()
    after = load.acknowledged()
    time.sleep(_REST_S)
    times = _times(manifest) | {
        "backup": (end - start) / 1e9,
        "stall": load.statistics(since_ns=start, until_ns=end).worst_s,
    }
    return Taken(manifest=manifest, before=before, after=after, end=None, times=times)


def _take_stopped(site: Site, load: WriteLoad) -> Taken:
    load.start()
    load.warm_up(_WARM_UP_WRITES)
    load.check_alive()
    load.stop()
    site.scene.server.stop()
    ctx = site.scene.context()
    manifest = backup(ctx, ctx.config.job("demo"))
    end = site.end_of_logs()
    site.scene.server.start()
    acknowledged = load.acknowledged()
    return Taken(manifest=manifest, before=acknowledged, after=acknowledged, end=end, times=_times(manifest))


def _times(manifest: Manifest) -> dict[str, float]:
    quiesce = manifest.quiesce
    assert quiesce is not None
    return {
        "wait": quiesce.waited_s,
        "hold": quiesce.held_s,
        "call": sum(member.call_s for member in manifest.members),
        "frozen": quiesce.frozen_s,
    }


def _take_bare(site: Site, load: WriteLoad) -> dict[str, float]:
    """Time a bare call for each member."""
    if not site.subvolumes:
        return {}
    calls = [bare_snapshot(path, path.with_name("bare")) for path in site.subvolumes]
    time.sleep(_REST_S)
    stall_s = load.statistics(since_ns=calls[0][0] - int(_REST_S * 1e9), until_ns=calls[-1][1]).worst_s
    return {"bare": sum(end - start for start, end in calls) / 1e9, "bare_stall": stall_s}


def refuse(site: Site, cell: Cell) -> str:
    """Try a backup that snapmgr must refuse, and return its reason.

    Raises UnexpectedError if it was not refused, for another reason than the cell's, or left something.
    """
    assert cell.refusal is not None
    site.configure(cell.level)
    if cell.level == "stopped":
        site.scene.server.stop()
    kept, known = site.stored(), site.scene.states()
    ctx = site.scene.context()
    try:
        manifest = backup(ctx, ctx.config.job("demo"))
    except SnapmgrError as error:
        reason = error.message
    else:
        raise UnexpectedError(f"{cell.id} was not refused: {manifest.id} is {manifest.state}")
    finally:
        if cell.level == "stopped":
            site.scene.server.start()
    if not re.search(cell.refusal, reason):
        raise UnexpectedError(f"{cell.id} was refused for another reason than {cell.refusal!r}: {reason}")
    if (site.stored(), site.scene.states()) != (kept, known):
        raise UnexpectedError(f"{cell.id} was refused and left {site.stored()} instead of {kept}")
    return reason
