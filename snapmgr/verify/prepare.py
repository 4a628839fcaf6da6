"""Prepares a snapshot: a throwaway server recovers a writable clone and shuts down; the clone stays mounted."""

from __future__ import annotations

import os
import re
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from snapmgr.access.attach import attach, copies, data_path, place_of, release_or_tell, space_required
from snapmgr.access.autoextend import auto_extended
from snapmgr.capacity.lost import removing_if_lost, require_sound_reads
from snapmgr.config.model import Verify
from snapmgr.contract.errors import ConfigError, VerificationError
from snapmgr.mysql.datadir.origin import read_origin
from snapmgr.mysql.datadir.plainfile import open_plain
from snapmgr.mysql.datadir.relocation import name_own_logs, relocated_options, seen_from
from snapmgr.mysql.lock.position import read_gtid
from snapmgr.mysql.server.program import server_for
from snapmgr.mysql.server.throwaway import copy_server
from snapmgr.physical.apply import make_ready
from snapmgr.system.host import signals_held
from snapmgr.system.kernel import sync_file_system

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.catalog.manifest import Lease, Manifest
    from snapmgr.catalog.store import Entry
    from snapmgr.context import Context

# Messages of InnoDB, Aria and the binary log's coordinator in MariaDB and MySQL when there is something to recover.
_RECOVERY = re.compile(
    r"Starting crash recovery|Log scan progressed|Recovering after a crash|Aria engine: starting recovery|"
    r"Doing recovery|XA crash recovery|was not shut ?down normally|Applying a batch of [1-9]\d* redo log records",
    re.IGNORECASE,
)
_SHUTDOWN_S = 600.0


class Prepared(Struct, frozen=True, kw_only=True):
    """A datadir that was cleanly shut down, and facts about it."""

    lease: Lease
    data_path: Path
    server: str
    """Flavor and version of the program that recovered it."""
    recovered: bool
    """Whether there was anything to recover; a stopped server's data need no recovery."""
    server_uuid: str | None
    """MySQL: the new UUID, which differs from the source's. MariaDB has none."""
    gtid: str
    """Of the recovered server; "" without binary logs."""
    options: tuple[str, ...]
    """The options that a server on it needs, with every path; empty if the source server was not recorded."""
    duration_s: float


def prepare(
    ctx: Context,
    entry: Entry,
    how: Verify | None = None,
    *,
    pool_bytes: int | None = None,
    point: Path | None = None,
) -> Prepared:
    """Mount a writable clone of a READY snapshot, let a throwaway server recover it and shut it down cleanly.

    Args:
        ctx: the job's surroundings.
        entry: the snapshot of a database.
        how: the job's verify table: its program, options, memory and time limit apply.
        pool_bytes: size of the server's buffer pool; by default the part of the memory of `how` that is left for it.
        point: mount point; by default a fresh folder in the scratch directory.

    The proof: the server is started a second time and finds nothing to recover. The clone stays mounted until `umount`;
    the snapshot does not change. An interrupted or failed prepare leaves nothing behind.

    Raises ConfigError for the snapshot of a directory, StorageError if it is not READY, VerificationError if it does
    not recover, MissingRequirementError if this machine is the cause (no server program, memory or space).
    """
    manifest = entry.manifest
    if manifest.source == "directory":
        raise ConfigError(
            f"{manifest.id} is the snapshot of a directory: only a database's files have to be recovered",
            hint=f"snapmgr mount {manifest.short_id}",
        )
    how = how or Verify()
    start = time.monotonic()
    with removing_if_lost(ctx, manifest):
        lease = attach(ctx, entry, writable=True, why="prepare", point=point)
    with removing_if_lost(ctx, manifest), space_required(f"prepare snapshot {manifest.id}"):
        try:
            recovery = _Recovery(ctx, manifest, lease, how, pool_bytes)
            with auto_extended(ctx, manifest):
                applied = make_ready(
                    ctx,
                    manifest,
                    data_path(lease),
                    memory_bytes=pool_bytes or how.memory_bytes,
                    time_limit_s=how.time_limit_s,
                )
                recovered, last = recovery.run()
                recovered |= applied
            require_sound_reads(ctx, lease, manifest)
            with signals_held():
                lease = replace(lease, why="mount")
                ctx.catalog.write_lease(lease)
        except BaseException:
            if lease.why == "prepare":
                release_or_tell(ctx, lease)
            raise
    return Prepared(
        lease=lease,
        data_path=data_path(lease),
        server=f"{recovery.binary.flavor} {recovery.binary.version}",
        recovered=recovered,
        server_uuid=last.server_uuid,
        gtid=last.gtid,
        options=recovery.relocated_options(),
        duration_s=time.monotonic() - start,
    )


class _Run(Struct, frozen=True, kw_only=True):
    """One start of the server, to its clean end."""

    log: str
    gtid: str
    server_uuid: str | None


class _Recovery:
    """A throwaway server on an attached clone."""

    def __init__(self, ctx: Context, manifest: Manifest, lease: Lease, how: Verify, pool_bytes: int | None) -> None:
        self._ctx = ctx
        self._recorded = manifest.server
        self._datadir = manifest.path
        self._data = data_path(lease)
        self._copies = copies(lease, manifest)
        self._how = how
        self._absent = manifest.absent
        self.binary = server_for(manifest.server, self._data, how.server)
        # The server takes the last one given.
        pool = (f"--innodb-buffer-pool-size={pool_bytes}",) if pool_bytes is not None else ()
        self._options = (*how.options, *pool, "--innodb-fast-shutdown=1")

    def run(self) -> tuple[bool, _Run]:
        """Recover, shut down and prove it; return whether there was something to recover, and the last start."""
        self._ctx.tell(f"recovering with {self.binary.flavor} {self.binary.version}")
        wrote = self._recorded.version if self._recorded is not None else read_origin(self._data).version
        if self.binary.is_upgrade(wrote):
            self._ctx.tell(f"warning: {wrote} wrote the data; a server older than this one cannot open them afterwards")
        first = self._start()
        self._ctx.tell("recovered and shut down; starting again to prove that nothing is left to recover")
        second = self._start()
        left = _RECOVERY.search(second.log)
        if left is not None:
            raise VerificationError(
                f"the server had to recover again after a clean shutdown: {left[0]!r} in its log",
                hint="this should not happen; examine the snapshot: snapmgr verify, snapmgr mount",
            )
        self._rewrite_indexes()
        with _opened(self._data) as fd:
            sync_file_system(fd)
        return _RECOVERY.search(first.log) is not None, second

    def relocated_options(self) -> tuple[str, ...]:
        """Return the options for a server on the clone."""
        if self._recorded is None:
            return ()
        return relocated_options(
            self._recorded,
            lambda path: str(place_of(path, self._copies) or path),
            places=self._copies.keys(),
            absent=self._absent,
        )

    def _start(self) -> _Run:
        with copy_server(
            self._data,
            self._recorded,
            binary=self.binary,
            memory_bytes=self._how.memory_bytes,
            options=self._options,
            originals=self._copies,
            scratch_dir=self._ctx.config.scratch_dir,
            time_limit_s=self._how.time_limit_s,
        ) as server:
            with server.connect() as connection:
                gtid = read_gtid(connection, self.binary.flavor)
                mysql = self.binary.flavor == "mysql"
                uuid = str(connection.value("SELECT @@GLOBAL.server_uuid")) if mysql else None
            if not server.shutdown(time_limit_s=_SHUTDOWN_S):
                raise VerificationError(
                    f"the server on the clone did not shut down cleanly: {server.excerpt()}",
                    hint="check the free space on the clone's file system",
                )
            log = server.log_text()
        return _Run(log=log, gtid=gtid, server_uuid=uuid)

    def _rewrite_indexes(self) -> None:
        """Make the indexes of binary and relay logs name the clone's files: a replica would purge the live ones."""
        settings = self._recorded.settings if self._recorded is not None else {}
        for kind in ("log_bin", "relay_log"):
            if base := settings.get(f"{kind}_basename"):
                index, logs = settings.get(f"{kind}_index", f"{base}.index"), self._copy_of(base).parent
                self._rewrite_index(self._copy_of(index), logs)
                if kind == "relay_log" and (applied := settings.get("relay_log_info_file")):
                    self._rewrite_applied(self._copy_of(applied), logs)

    def _rewrite_applied(self, path: Path, logs: Path) -> None:
        with suppress(FileNotFoundError), _opened(path.parent) as folder_fd:
            name_own_logs(path.name, folder_fd, seen_from(str(self._data), str(logs)), os.listdir(logs))

    def _rewrite_index(self, index: Path, logs: Path) -> None:
        seen = os.fsencode(seen_from(str(self._data), str(logs)))
        with suppress(FileNotFoundError), open_plain(str(index), write=True) as file:
            names = [os.path.basename(line) for line in file.read().splitlines() if line]
            file.seek(0)
            file.writelines(os.path.join(seen, name) + b"\n" for name in names)
            file.truncate()

    def _copy_of(self, path: str) -> Path:
        """Return where the copy of `path` (from the datadir) is; in the clone's datadir if its folder has no copy."""
        copy = place_of(os.path.join(self._datadir, path), self._copies)
        return copy if copy is not None and copy.parent.is_dir() else self._data / os.path.basename(path)


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
