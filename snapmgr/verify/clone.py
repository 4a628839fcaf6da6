"""Makes a writable clone of a snapshot and runs a development server on it until `umount`."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from snapmgr.access.attach import attach, copies, data_path, part_point, release, release_or_tell, space_required
from snapmgr.capacity.lost import removing_if_lost, require_sound_reads
from snapmgr.catalog.manifest import CloneServer
from snapmgr.config.model import Verify
from snapmgr.contract.errors import ConfigError, InUseError
from snapmgr.mysql.server.development import check_options, end_server, held_server, port_problem
from snapmgr.mysql.server.program import find_server, server_for
from snapmgr.physical.apply import make_ready
from snapmgr.restore.destination_check import choose_destination
from snapmgr.system.host import is_alive
from snapmgr.system.mount import holders

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.catalog.manifest import Lease
    from snapmgr.catalog.store import Entry
    from snapmgr.context import Context

MEMORY_BYTES = 256 << 20
SHUTDOWN_S = 60.0


class ClonePlan(Struct, frozen=True, kw_only=True):
    """The settings of a clone, checked."""

    entry: Entry
    point: Path
    port: int | None
    """None: only a socket."""
    memory_bytes: int
    server: str | None
    """The program; None: the installed one that fits."""
    options: tuple[str, ...]
    time_limit_s: float


def plan_clone(
    ctx: Context,
    entry: Entry,
    point: str,
    *,
    port: int | None = None,
    memory_bytes: int = MEMORY_BYTES,
    server: str | None = None,
    options: Sequence[str] = (),
    how: Verify | None = None,
) -> ClonePlan:
    """Check the arguments of `clone`, and return its plan. Change nothing.

    Args:
        ctx: the job's surroundings.
        entry: the snapshot of a database.
        point: mount point: an empty folder, or a new one in an existing folder.
        port: of 127.0.0.1.
        memory_bytes: limit of the server's buffers together.
        server: the program.
        options: further options of the server.
        how: the job's verify table: its program, options and time limit apply, unless others are given.

    Raises ConfigError for the snapshot of a directory and for an unacceptable `point`, port or option, StorageError if
    the snapshot is not READY, MissingRequirementError without the server program.
    """
    how = how or Verify()
    manifest = entry.manifest
    manifest.require_ready("cloned")
    if manifest.source == "directory":
        raise ConfigError(
            f"{manifest.id} is the snapshot of a directory: a server cannot run on it",
            hint=f"snapmgr mount {manifest.short_id}",
        )
    given = (*how.options, *(option if option.startswith("--") else f"--{option}" for option in options))
    check_options(given)
    where = _choose_point(ctx, entry, point)
    leases = ctx.catalog.leases()[0]
    for lease in leases:
        if lease.point == where:
            raise ConfigError(f"{where} is in use: {lease.why} by {lease.user}", hint=f"snapmgr umount {where}")
    if port is not None and (problem := port_problem(port)) is not None:
        users = [one.point for one in leases if one.server is not None and one.server.port == port]
        hint = f"the clone at {users[0]} uses it; " if users else f"to see its user: ss -ltnp 'sport = :{port}'; "
        raise ConfigError(problem, hint=hint + "name another port, or none to have only a socket")
    if manifest.server is not None:
        # Whether it also fits the data is checked when they can be read.
        find_server(manifest.server.flavor, server or how.server, ran=manifest.server.program)
    return ClonePlan(
        entry=entry,
        point=Path(where),
        port=port,
        memory_bytes=memory_bytes,
        server=server or how.server,
        options=given,
        time_limit_s=how.time_limit_s,
    )


def _choose_point(ctx: Context, entry: Entry, point: str) -> str:
    manifest = entry.manifest
    sources = {manifest.path, *(path for member in manifest.members for path in member.places)}
    ours = {str(ctx.config.state_dir): "the state directory", str(ctx.config.scratch_dir): "the scratch directory"}
    pools = (member.ref.pool.id for member in manifest.members)
    ours |= {pool: "the folder of copies" for pool in pools if pool.startswith("/")}
    return choose_destination(point, sources=sources, barred=ours)


def clear_dead(ctx: Context, point: str) -> None:
    """Remove the leftovers of a killed `clone` at `point`, so that the same command can be run again."""
    where = os.path.realpath(point)
    for lease in ctx.catalog.leases()[0]:
        if lease.why == "clone" and lease.point == where and not lease.stays and not is_alive(lease.holder):
            ctx.tell(f"removing the leftovers of a killed clone at {where}")
            end_clone(ctx, lease, force=True)


def clone(ctx: Context, plan: ClonePlan) -> Lease:
    """Mount a writable clone, start a server on it that continues to run, and return their lease.

    The lease is on disk before anything is attached, and the server's pid before the server begins. If we are killed
    before the server answers, `umount`, ``doctor --fix`` or the next run of the job ends it. A failed or interrupted
    clone leaves nothing behind. The snapshot does not change.

    Raises VerificationError if the server does not start on the data, MissingRequirementError if this machine is the
    cause, StorageError if the clone cannot be mounted.
    """
    manifest = plan.entry.manifest
    with removing_if_lost(ctx, manifest):
        lease = attach(ctx, plan.entry, writable=True, why="clone", point=plan.point)
    with removing_if_lost(ctx, manifest), space_required(f"start a server on a clone of {manifest.id}"):
        try:
            recorded, data = manifest.server, data_path(lease)
            make_ready(ctx, manifest, data, memory_bytes=plan.memory_bytes, time_limit_s=plan.time_limit_s)
            binary = server_for(recorded, data, plan.server)
            facts = CloneServer(
                folder=str(ctx.config.scratch_dir.absolute() / f"c{lease.id}"),
                port=plan.port,
                program=f"{binary.flavor} {binary.version}",
            )
            lease = _record(ctx, lease, facts)
            with held_server(
                binary,
                data,
                settings=recorded.settings if recorded is not None else {},
                memory_bytes=plan.memory_bytes,
                run_dir=facts.folder,
                port=plan.port,
                options=plan.options,
                originals=copies(lease, manifest),
                mounts=ctx.mounter.mounts(),
            ) as server:
                facts = replace(facts, process=server.record, server_id=server.server_id)
                lease = _record(ctx, lease, facts)
                ctx.tell(f"starting {facts.program} on a clone")
                server.run(plan.time_limit_s)
                facts = replace(facts, server_uuid=server.uuid(), answered_at=datetime.now(UTC))
                lease = _record(ctx, lease, facts)
                require_sound_reads(ctx, lease, manifest)
        except BaseException:
            release_or_tell(ctx, lease)
            raise
    return lease


def _record(ctx: Context, lease: Lease, server: CloneServer) -> Lease:
    """Write the current facts about the server into the lease; return the new lease."""
    lease = replace(lease, server=server)
    ctx.catalog.write_lease(lease)
    return lease


def end_clone(ctx: Context, lease: Lease, *, force: bool, time_limit_s: float = SHUTDOWN_S) -> None:
    """Shut down the server of a clone, or kill it with `force`, and remove the clone. Idempotent.

    Raises InUseError, and leaves the server running, if anybody else uses the mount; also if the server does not shut
    down in time.
    """
    process = lease.server.process if lease.server is not None else None
    if lease.server is not None and process is not None and is_alive(process):
        mounts = ctx.mounter.mounts()
        found = (user for part in lease.parts for user in holders(part_point(lease, part), mounts))
        others = [user for user in dict.fromkeys(found) if f" (pid {process.pid}, " not in user]
        if others:
            raise InUseError(
                f"{lease.point} is in use by {', '.join(others)}: its server continues to run",
                hint="end these processes, or leave the folder, and try again",
            )
        # A server that never answered needs no clean shutdown: it is still held, or its maker was killed as it started.
        kill = force or lease.server.answered_at is None
        if not end_server(process, kill=kill, time_limit_s=time_limit_s):
            raise InUseError(
                f"the server on {lease.point} (pid {process.pid}) did not shut down within {time_limit_s:.0f} s",
                hint=f"wait for it (see {lease.server.log}), or kill it: snapmgr umount --force {lease.point}",
            )
    release(ctx, lease)
