"""Gets single tables back: a throwaway server on a clone of a snapshot, and the server's own dump program."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.access.attach import attached, copies, data_path, space_required
from snapmgr.capacity.lost import removing_if_lost, require_sound_reads
from snapmgr.config.model import Verify
from snapmgr.contract.errors import (
    CommandError,
    ConfigError,
    MissingRequirementError,
    NotFoundError,
    StorageError,
    VerificationError,
)
from snapmgr.mysql.server.program import server_for
from snapmgr.mysql.server.throwaway import copy_server
from snapmgr.physical.apply import make_ready
from snapmgr.system.command import find_program
from snapmgr.system.files import space_hint, sync_folder
from snapmgr.system.trust import changeable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.catalog.manifest import Manifest
    from snapmgr.catalog.store import Entry
    from snapmgr.context import Context
    from snapmgr.mysql.server.program import ServerBinary
    from snapmgr.mysql.server.throwaway import ThrowawayServer

_NAMES = {"mariadb": ("mariadb-dump", "mysqldump"), "mysql": ("mysqldump",)}
# No DROP TABLE: loaded into the wrong database, the dump must not remove a live table.
_OPTIONS = ("--skip-add-drop-table", "--skip-lock-tables", "--single-transaction", "--hex-blob", "--no-tablespaces")
_MYSQL_OPTIONS = ("--set-gtid-purged=OFF",)
_COMPLETE = b"-- Dump completed"
_END_BYTES = 200


class TablesPlan(Struct, frozen=True, kw_only=True):
    """The arguments of `dump_tables`, checked."""

    entry: Entry
    schema: str
    tables: tuple[str, ...]
    dest: Path
    """A file that does not exist yet."""


class TablesDump(Struct, frozen=True, kw_only=True):
    """A finished dump."""

    size_bytes: int
    server: str
    """Flavor and version of the server that read the tables."""
    duration_s: float


def plan_tables(entry: Entry, names: Sequence[str], dest: str) -> TablesPlan:
    """Check the arguments of a dump, and return its plan. Change nothing.

    Args:
        entry: the snapshot of a database.
        names: of tables, as "shop.orders"; all of one database.
        dest: the new file; its folder exists.

    Raises ConfigError, StorageError for a snapshot that is not READY.
    """
    manifest = entry.manifest
    manifest.require_ready("restored")
    if manifest.source == "directory":
        raise ConfigError(
            f"{manifest.id} is the snapshot of a directory: it has no tables",
            hint=f"snapmgr mount {manifest.short_id}, and copy the file",
        )
    pairs = [name.partition(".") for name in dict.fromkeys(names)]
    if wrong := [schema for schema, _, table in pairs if not schema or not table]:
        raise ConfigError(f"{wrong[0]!r} is not the name of a table", hint="write DATABASE.TABLE: shop.orders")
    if len({schema for schema, _, _ in pairs}) > 1:
        raise ConfigError(f"{', '.join(names)} are of several databases", hint="dump one database at a time")
    path = Path(dest).absolute()
    if os.path.lexists(path):
        raise ConfigError(f"{path} exists, and a restore overwrites nothing", hint="name a new file")
    if not path.parent.is_dir():
        raise ConfigError(f"the folder {path.parent} does not exist", hint="create it, or name another file")
    return TablesPlan(entry=entry, schema=pairs[0][0], tables=tuple(table for _, _, table in pairs), dest=path)


def dump_tables(ctx: Context, plan: TablesPlan, how: Verify | None = None) -> TablesDump:
    """Dump tables of a snapshot into a new SQL file; the snapshot does not change.

    `how` is the job's verify table: its program, options, memory and time limit apply. A dump that fails or is
    interrupted leaves no file. Raises NotFoundError for a table that does not exist, VerificationError if the server
    does not start or cannot read the tables, MissingRequirementError if this machine is the cause.
    """
    how, manifest = how or Verify(), plan.entry.manifest
    start = time.monotonic()
    deadline = start + how.time_limit_s
    hidden = plan.dest.with_name(f".{plan.dest.name}.snapmgr-{os.getpid()}")
    try:
        with (
            removing_if_lost(ctx, manifest),
            space_required(f"dump tables of {manifest.id}"),
            attached(ctx, plan.entry, why="restore") as lease,
        ):
            data = data_path(lease)
            make_ready(ctx, manifest, data, memory_bytes=how.memory_bytes, time_limit_s=how.time_limit_s)
            binary = server_for(manifest.server, data, how.server)
            program = _dump_program(binary)
            with copy_server(
                data,
                manifest.server,
                binary=binary,
                memory_bytes=how.memory_bytes,
                options=how.options,
                originals=copies(lease, manifest),
                scratch_dir=ctx.config.scratch_dir,
                time_limit_s=deadline - time.monotonic(),
                tell=ctx.tell,
            ) as server:
                _require_tables(server, plan)
                server.complaints()
                failure: CommandError | None = None
                try:
                    _dump(ctx, program, server, plan, hidden, time_limit_s=deadline - time.monotonic())
                except CommandError as error:
                    failure = error
                # A server returns a BLOB that it cannot read as empty, and only logs the reason.
                if (damaged := server.complaints()) or not server.running:
                    raise VerificationError(
                        f"the tables cannot be read completely: {'; '.join(damaged) or server.excerpt()}",
                        hint=f"use another snapshot: snapmgr list {manifest.job}",
                    )
                if failure is not None:
                    raise failure
            require_sound_reads(ctx, lease, manifest)
        size_bytes = _publish(hidden, plan.dest)
    finally:
        with suppress(OSError):
            hidden.unlink()
    return TablesDump(
        size_bytes=size_bytes,
        server=f"{binary.flavor} {binary.version}",
        duration_s=time.monotonic() - start,
    )


def _require_tables(server: ThrowawayServer, plan: TablesPlan) -> None:
    sql = "SELECT TABLE_NAME AS t FROM information_schema.TABLES WHERE TABLE_SCHEMA = %s AND TABLE_TYPE <> 'VIEW'"
    with server.connect() as connection:
        here = {str(row["t"]) for row in connection.rows(sql, (plan.schema,))}
    missing = [f"{plan.schema}.{table}" for table in plan.tables if table not in here]
    if missing:
        known = ", ".join(sorted(here)[:20]) or "none"
        raise NotFoundError(
            f"{plan.entry.manifest.id} has no table {', '.join(missing)}", hint=f"tables of {plan.schema}: {known}"
        )


def _dump(
    ctx: Context, program: str, server: ThrowawayServer, plan: TablesPlan, hidden: Path, *, time_limit_s: float
) -> None:
    # The file is created here: its owner and mode do not depend on the program.
    os.close(os.open(hidden, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    flavored = _MYSQL_OPTIONS if server.binary.flavor == "mysql" else ()
    ctx.tell(f"dumping {', '.join(plan.tables)} of {plan.schema}")
    ctx.runner.run(
        [
            program,
            "--no-defaults",
            f"--socket={server.socket}",
            "--user=root",
            *_OPTIONS,
            *flavored,
            f"--result-file={hidden}",
            "--",
            plan.schema,
            *plan.tables,
        ],
        timeout_s=max(time_limit_s, 0.001),
    )


def _publish(hidden: Path, dest: Path) -> int:
    """Give a finished dump its name, which nobody may have taken meanwhile; return its size."""
    try:
        with hidden.open("rb") as file:
            size_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(size_bytes - _END_BYTES, 0))
            if _COMPLETE not in file.read():
                raise VerificationError(f"the dump for {dest} is not complete", hint="is there enough space?")
            os.fsync(file.fileno())
        os.link(hidden, dest)
        sync_folder(dest.parent)
    except FileExistsError:
        raise ConfigError(f"{dest} exists by now, and a restore overwrites nothing", hint="name a new file") from None
    except OSError as error:
        raise StorageError(f"cannot write {dest}: {error.strerror}", hint=space_hint(error)) from None
    return size_bytes


def _dump_program(binary: ServerBinary) -> str:
    """Return the dump program beside a server's, else an installed one. Raises MissingRequirementError."""
    root = Path(os.path.realpath(binary.path)).parent.parent
    for name in _NAMES[binary.flavor]:
        path = root / "bin" / name
        if path.is_file() and changeable(path.stat()) is None:
            return str(path)
    for name in _NAMES[binary.flavor]:
        with suppress(MissingRequirementError):
            return find_program(name)
    raise MissingRequirementError(
        f"the program {_NAMES[binary.flavor][0]} is not installed", hint=f"apt-get install {binary.flavor}-client"
    )


def load_hint(plan: TablesPlan, manifest: Manifest) -> str:
    """Return how to load the dump."""
    client = "mariadb" if manifest.server is not None and manifest.server.flavor == "mariadb" else "mysql"
    return (
        f"to load it into a database that does not have these tables: {client} DATABASE < {plan.dest}; it drops nothing"
    )
