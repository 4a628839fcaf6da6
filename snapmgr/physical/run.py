"""Makes a tool backup: the server's own tool copies the files to a staging folder and applies redo; we seal the result.

After a full or an incremental copy the staging folder holds all data: its snapshot restores without any other.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from snapmgr.access.attach import reached
from snapmgr.catalog.manifest import ServerRecord
from snapmgr.catalog.physical import PhysicalRecord, State
from snapmgr.contract.abilities import FolderCloning
from snapmgr.contract.errors import ConfigError, NotFoundError, NotQuiescedError, StorageError
from snapmgr.mysql.connect.identity import program_of
from snapmgr.mysql.datadir.settings import PATH_SETTINGS
from snapmgr.physical.apply import ShownProgress
from snapmgr.physical.history import break_since, identity, mark, run_of
from snapmgr.physical.seal import compare, seal
from snapmgr.physical.staging import Staging
from snapmgr.physical.tools.choose import choose_tool, require_tool
from snapmgr.physical.tools.leftout import require_all_tables
from snapmgr.physical.tools.request import ApplyRequest, BrokenChainError, CopyRequest, FullError, Tool, ToolBackup
from snapmgr.physical.tools.stagefolder import give_owner
from snapmgr.source.server import probe_server
from snapmgr.source.volumes import SourceNeeds, choose_backend

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from snapmgr.catalog.manifest import Manifest, Position, SourcePosition
    from snapmgr.config.model import Job
    from snapmgr.context import Context
    from snapmgr.physical.seal import Fingerprint
    from snapmgr.source.server import LiveServer

_SHOWN = 5
# Folders of the live server.
_ELSEWHERE = ("innodb_directories",)
# The size of a tool's reads; mariadb-backup: 1 MiB.
_CHUNK_BYTES = {"xtrabackup": 10 << 20}


class SealedBackup(Struct, frozen=True, kw_only=True):
    """A finished backup in the staging folder, sealed."""

    path: str
    server: ServerRecord
    position: Position | None
    sources: tuple[SourcePosition, ...]
    record: PhysicalRecord
    seal: Fingerprint

    def require_unchanged(self) -> None:
        """Raise NotQuiescedError, with the names, if anything in it has changed since it was sealed."""
        changed = compare(self.path, self.seal, contents=self.seal.checksums)
        if changed:
            more = f"; and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
            raise NotQuiescedError(
                f"the sealed backup in {self.path} changed: {'; '.join(changed[:_SHOWN])}{more}",
                hint="nobody but snapmgr may write to the staging folder; then try again",
            )


class ToolBackupPlan(Struct, frozen=True, kw_only=True):
    """The tool, and the base of an increment."""

    tool: Tool
    live: LiveServer
    base: Manifest | None
    """The backup to which an increment would be applied; None: a full backup."""
    full_because: str | None
    """Why an incremental job makes a full backup."""

    @property
    def words(self) -> str:
        """The planned copy, in words."""
        if self.base is not None:
            return f"{self.tool.name} fetches what changed since {self.base.id}"
        why = f" ({self.full_because})" if self.full_because else ""
        return f"{self.tool.name} fetches all data{why}"


def plan_tool_backup(ctx: Context, job: Job) -> ToolBackupPlan:
    """Examine the server and the last backup; changes nothing. Raises MissingRequirementError without the tool."""
    live = probe_server(job)
    live.abilities.refuse_cluster()
    server_program = program_of(live.identity.pid)
    tool = choose_tool(job.tool, live.identity.flavor, live.identity.version, server_program=server_program)
    require_tool(tool)
    base, why = None, None
    if job.mode == "incremental":
        base, why = _find_base(ctx, job, tool, live)
    return ToolBackupPlan(tool=tool, live=live, base=base, full_because=why)


def _find_base(ctx: Context, job: Job, tool: Tool, live: LiveServer) -> tuple[Manifest | None, str | None]:
    if not tool.increments:
        raise ConfigError(
            f"{tool.name} makes no increments", hint=f'set mode = "full" in the job {job.name}, or another tool'
        )
    ready = [
        entry
        for entry in ctx.catalog.entries(job.name)[0]
        if entry.manifest.state == "ready" and entry.manifest.physical is not None
    ]
    if not ready:
        return None, "there is no backup yet"
    base, verification = ready[-1].manifest, ready[-1].verification
    record = base.physical
    if record is None or record.tool != tool.name:
        return None, f"the last backup was made by {record.tool if record else 'another tool'}"
    if verification is not None and verification.result == "failed":
        # Every later backup would inherit its damage.
        return None, f"{base.id} failed its verification"
    if not isinstance(ctx.backend(base.backend), FolderCloning):
        return None, f"the {base.backend} storage cannot clone a folder"
    return (None, why) if (why := break_since(live, record)) else (base, None)


@contextmanager
def staged(ctx: Context, job: Job) -> Iterator[SealedBackup]:
    """Have the tool copy the server into the job's staging folder; remove the folder when the context ends.

    The caller holds the job's lock.

    Raises the errors of `plan_tool_backup`; StorageError if the tool fails or storage is full. Leaves nothing then.
    """
    plan = plan_tool_backup(ctx, job)
    folder = Staging(ctx, job, plan.live.identity.datadir)
    folder.begin()
    try:
        # Fails before the tool copies anything if no storage can hold it.
        choose_backend(ctx, job, SourceNeeds(path=str(folder.path)))
        yield _ToolBackupRun(ctx, job, plan, folder).run()
    finally:
        folder.end()


class _UnusableBaseError(StorageError):
    """The base is missing, damaged, or cannot be cloned beside the staging folder: only a full backup helps."""


@contextmanager
def _unusable() -> Iterator[None]:
    """Turn a failure of the base into the reason for a full backup, except for missing space."""
    try:
        yield
    except (BrokenChainError, FullError):
        raise
    except (StorageError, NotFoundError) as error:
        raise _UnusableBaseError(error.message, hint=error.hint) from error


class _Fetched(Struct, frozen=True, kw_only=True):
    """The copied backup, and the resulting state of the data in the staging folder."""

    made: ToolBackup
    state: State
    copy_s: float
    apply_s: float


class _ToolBackupRun:
    """Makes one tool backup in a staging folder."""

    def __init__(self, ctx: Context, job: Job, plan: ToolBackupPlan, folder: Staging) -> None:
        self._ctx = ctx
        self._job = job
        self._plan = plan
        self._live = plan.live
        self._tool = plan.tool
        self._folder = folder
        self._log = ctx.catalog.tool_log(job.name)

    def run(self) -> SealedBackup:
        plan = self._plan
        base, why = plan.base, plan.full_because
        fetched: _Fetched | None = None
        if base is not None and base.physical is not None:
            try:
                fetched = self._fetch_increment(base, base.physical)
            except (BrokenChainError, _UnusableBaseError) as error:
                why = f"an increment to {base.id} failed: {error.message}"
                self._folder.begin()
        if fetched is None:
            base = None
            if why is not None:
                self._ctx.tell(f"a full backup: {why}")
            begun = time.monotonic()
            made = self._back_up(self._folder.data, 0)
            fetched = _Fetched(made=made, state=made.state, copy_s=time.monotonic() - begun, apply_s=0.0)
        made = fetched.made
        sealed_at = time.monotonic()
        give_owner(self._folder.data, self._live.identity.uid, self._live.identity.gid)
        self._ctx.tell(f"sealing {self._folder.data}")
        fingerprint = seal(
            str(self._folder.data),
            checksums=self._job.checksums,
            progress=partial(self._ctx.progress, "sealing"),
        )
        record = PhysicalRecord(
            tool=made.tool,
            tool_version=made.tool_version,
            kind="full" if base is None else "incremental",
            state=fetched.state,
            from_lsn=made.from_lsn,
            to_lsn=made.to_lsn,
            base=base.id if base is not None else None,
            full_because=why if base is None else None,
            datadir=self._live.identity.datadir,
            identity=identity(self._live),
            run=run_of(self._live),
            binlog=mark(self._live),
            fetched_bytes=made.size_bytes,
            size_bytes=fingerprint.size_bytes,
            files=fingerprint.files,
            copy_s=fetched.copy_s,
            apply_s=fetched.apply_s,
            seal_s=time.monotonic() - sealed_at,
            fingerprint=fingerprint.digest,
        )
        return SealedBackup(
            path=str(self._folder.data),
            server=server_of(self._live, str(self._folder.data)),
            position=made.position,
            sources=made.sources,
            record=record,
            seal=fingerprint,
        )

    def _back_up(self, folder: Path, from_lsn: int) -> ToolBackup:
        folder.mkdir(mode=0o700)
        what = f"what changed since LSN {from_lsn}" if from_lsn else "all data"
        self._ctx.tell(f"{self._tool.name} fetches {what} into {folder}")
        made = self._tool.back_up(
            CopyRequest(
                folder=str(folder),
                log=str(self._log),
                credentials=self._live.credentials,
                identity=self._live.identity,
                from_lsn=from_lsn,
                throttle=self._throttle(),
                parallel=self._job.parallel,
                options=self._job.tool_options,
                time_limit_s=self._job.tool_time_limit_s,
                progress=ShownProgress(self._ctx),
            )
        )
        require_all_tables(str(folder), self._live.identity.datadir, str(self._log), made)
        return made

    def _throttle(self) -> int:
        """Return the job's limit in the tool's unit: chunks a second."""
        if self._job.throttle_bytes is None:
            return 0
        return max(self._job.throttle_bytes // _CHUNK_BYTES.get(self._tool.name, 1 << 20), 1)

    def _fetch_increment(self, base: Manifest, record: PhysicalRecord) -> _Fetched:
        begun = time.monotonic()
        # Before the server has any work: this fails if the base is lost or elsewhere. The base may be deleted later.
        with _unusable():
            self._clone(base, record)
        cloned = time.monotonic()
        made = self._back_up(self._folder.increment, record.to_lsn)
        copied_at = time.monotonic()
        self._ctx.tell(f"applying it to a clone of {base.id}")
        with _unusable():
            self._apply(str(self._folder.increment))
        return _Fetched(
            made=made,
            state="redo-applied" if self._tool.name == "xtrabackup" else "prepared",
            copy_s=copied_at - cloned,
            apply_s=time.monotonic() - copied_at + cloned - begun,
        )

    def _clone(self, base: Manifest, record: PhysicalRecord) -> None:
        """Clone the base, ready for an increment."""
        backend = self._ctx.backend(base.backend)
        if not isinstance(backend, FolderCloning):
            raise StorageError(f"the {base.backend} storage cannot clone a folder")
        with reached(self._ctx, self._ctx.catalog.load(base.id), why="prepare") as source:
            backend.clone_folder(source, str(self._folder.data))
        if record.state == "raw":
            self._ctx.tell(f"{self._tool.name} applies the redo log to a clone of {base.id}")
            self._apply(None)

    def _apply(self, increment: str | None) -> None:
        """Apply redo or an increment; append the tool's output to that of the copy."""
        log = self._log.with_name(f"{self._job.name}.apply.log")
        self._tool.apply(
            ApplyRequest(
                folder=str(self._folder.data),
                log=str(log),
                increment=increment,
                redo_only=True,
                use_memory_bytes=self._job.prepare.use_memory_bytes or self._job.verify.memory_bytes,
                options=self._job.prepare.tool_options,
                time_limit_s=self._job.tool_time_limit_s,
                progress=ShownProgress(self._ctx),
            )
        )
        if increment is not None:
            # A missing part of the log must not fail the backup.
            with suppress(OSError), self._log.open("ab") as whole, log.open("rb") as part:
                shutil.copyfileobj(part, whole)
        log.unlink(missing_ok=True)


def server_of(live: LiveServer, path: str) -> ServerRecord:
    """Return the live server's record for a backup in the folder `path`, which has all files in one place."""
    record = live.record()
    kept = {name: value for name, value in record.settings.items() if name not in (*PATH_SETTINGS, *_ELSEWHERE)}
    # The tool puts the files of the system tablespace side by side.
    if files := kept.get("innodb_data_file_path"):
        kept["innodb_data_file_path"] = ";".join(os.path.basename(part) for part in files.split(";"))
    return replace(record, datadir=path, log_bin=None, settings=kept)
