"""Snapshots of a loaded server, each one's copy started and compared with what was recorded and acknowledged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.access.attach import attached, data_path
from snapmgr.backup.run import backup
from support.load import check_invariant, write_load
from support.server import private_server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from snapmgr.catalog.manifest import Lease, Manifest
    from snapmgr.context import Context
    from support.kinds import Kind
    from support.load import Acknowledged, LoadStatistics
    from support.server import PrivateServer


@dataclass(frozen=True, kw_only=True)
class Taken:
    """A snapshot, and what the writers had been told before and after it."""

    manifest: Manifest
    before: tuple[Acknowledged, ...]
    after: tuple[Acknowledged, ...]


def take(
    ctx: Context,
    server: PrivateServer,
    count: int,
    *,
    writers: int = 4,
    pause_s: float = 0.0,
    take_one: Callable[[], Manifest] | None = None,
) -> tuple[list[Taken], LoadStatistics]:
    """Take `count` snapshots while `writers` write, with `take_one` or by backups of the job "demo".

    Return the snapshots and how the writers fared; each rests for `pause_s` after a round.
    """
    job, taken = ctx.config.job("demo"), []
    with write_load(server.socket, writers=writers, pause_s=pause_s, engines=server.kind.engines) as load:
        load.warm_up()
        for _ in range(count):
            before = load.acknowledged()
            manifest = take_one() if take_one is not None else backup(ctx, job)
            taken.append(Taken(manifest=manifest, before=before, after=load.acknowledged()))
        load.check_alive()
        return taken, load.statistics()


def take_and_check(
    ctx: Context,
    server: PrivateServer,
    count: int,
    *,
    writers: int = 4,
    options: Callable[[Lease, Manifest], Sequence[str]] = lambda _lease, _manifest: (),
) -> list[Manifest]:
    """Take `count` snapshots of the job "demo" while `writers` write, then start a server on a clone of each.

    Each copy must agree with the recorded GTID and the end of the binlog, and hold all that was acknowledged before the
    backup began, nothing of what came after its end, and each engine as of one instant.

    Args:
        ctx: for the backups and for attaching.
        server: the job's, which gets the load.
        count: how many snapshots.
        writers: how many clients write.
        options: further ones of the server on a copy, given its lease: they may name folders of it.
    """
    taken, _ = take(ctx, server, count, writers=writers)
    for one in taken:
        with attached(ctx, ctx.catalog.load(one.manifest.id)) as lease:
            check_copy(data_path(lease), one, server.kind, options(lease, one.manifest))
    # The load went on meanwhile: no two may be of the same instant.
    manifests = [one.manifest for one in taken]
    assert len({manifest.position for manifest in manifests}) == count
    return manifests


def check_copy(datadir: Path, taken: Taken, kind: Kind, options: Sequence[str] = ()) -> None:
    """Start a server of `kind` on a writable copy and compare it with what was recorded and acknowledged."""
    position = taken.manifest.position
    assert position is not None
    assert (datadir / position.file).stat().st_size == position.offset
    with private_server(datadir, options, install_options=None, kind=kind.name) as copy:
        variable = "gtid_binlog_pos" if kind.flavor == "mariadb" else "gtid_executed"
        ((gtid,),) = copy.query(f"SELECT @@GLOBAL.{variable}")
        # MySQL breaks the line after each server's part.
        assert gtid.replace("\n", "") == position.gtid.replace("\n", "")
        with copy.connect() as connection:
            check_invariant(connection, before=taken.before, after=taken.after, engines=kind.engines)
