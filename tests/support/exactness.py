"""Snapshots of a loaded server, each one's copy started and compared with what was recorded and acknowledged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.jobs.attach import attached, data_path
from snapmgr.jobs.backup import backup
from support.load import check_invariant, write_load
from support.scene import SERVER_OPTIONS
from support.server import private_server

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from snapmgr.config import Job
    from snapmgr.jobs.context import Context
    from snapmgr.manifest import Lease, Manifest
    from support.kinds import Kind
    from support.load import Acknowledged
    from support.server import PrivateServer


def take_and_check(
    ctx: Context,
    job: Job,
    server: PrivateServer,
    count: int,
    *,
    writers: int = 4,
    options: Sequence[str] | Callable[[Lease, Manifest], Sequence[str]] = SERVER_OPTIONS,
) -> list[Manifest]:
    """Take `count` snapshots of `job` while `writers` write to `server`, then start a server on a clone of each.

    Each copy must agree with the recorded GTID and the end of the binlog, and hold all that was acknowledged before the
    backup began, nothing of what came after its end, and each engine as of one instant.

    Args:
        ctx: for the backups and for attaching.
        job: the job, whose server is `server`.
        server: the server that gets the load.
        count: how many snapshots.
        writers: how many clients write.
        options: those of the servers on the copies; a function of the lease where they name folders of the copy.
    """
    taken: list[tuple[Manifest, tuple[Acknowledged, ...], tuple[Acknowledged, ...]]] = []
    with write_load(str(server.socket), writers=writers, engines=server.kind.engines) as load:
        load.warm_up()
        for _ in range(count):
            before = load.acknowledged()
            manifest = backup(ctx, job)
            taken.append((manifest, before, load.acknowledged()))
        load.check_alive()
    for manifest, before, after in taken:
        with attached(ctx, ctx.catalog.load(manifest.id)) as lease:
            given = options(lease, manifest) if callable(options) else options
            _check(data_path(lease), manifest, given, server.kind, before, after)
    # The load went on meanwhile: no two may be of the same instant.
    assert len({manifest.position for manifest, _, _ in taken}) == count
    return [manifest for manifest, _, _ in taken]


def _check(
    datadir: Path,
    manifest: Manifest,
    options: Sequence[str],
    kind: Kind,
    before: tuple[Acknowledged, ...],
    after: tuple[Acknowledged, ...],
) -> None:
    position = manifest.position
    assert position is not None
    log_bin = next(option.partition("=")[2] for option in options if option.startswith("--log-bin="))
    assert (datadir / Path(log_bin).parent / position.file).stat().st_size == position.offset
    with private_server(datadir, options, install_options=None, kind=kind.name) as copy:
        variable = "gtid_binlog_pos" if kind.flavor == "mariadb" else "gtid_executed"
        ((gtid,),) = copy.query(f"SELECT @@GLOBAL.{variable}")
        # MySQL breaks the line after each server's part.
        assert gtid.replace("\n", "") == position.gtid.replace("\n", "")
        with copy.connect() as connection:
            check_invariant(connection, before=before, after=after, engines=kind.engines)
