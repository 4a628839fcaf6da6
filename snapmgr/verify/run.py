"""Proving that a snapshot restores: a throwaway server (or the job's check command) on a writable clone of it."""

from __future__ import annotations

import shlex
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.access.attach import attached, copies, data_path, room_wanted
from snapmgr.access.note import store_note
from snapmgr.capacity.lost import removing_if_lost, require_sound_reads
from snapmgr.catalog.manifest import Verification
from snapmgr.config.model import Verify
from snapmgr.contract.errors import (
    AlteredError,
    CommandError,
    ConfigError,
    NotFoundError,
    SnapmgrError,
    VerificationError,
)
from snapmgr.mysql.connect.client import MysqlError
from snapmgr.mysql.server.check import check_tables, run_assertions
from snapmgr.mysql.server.throwaway import copy_server
from snapmgr.physical.apply import make_ready
from snapmgr.verify.binlog_check import BinlogFindings, check_binlog, compare_gtid

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import Lease, Manifest
    from snapmgr.catalog.store import Entry
    from snapmgr.context import Context
    from snapmgr.mysql.connect.client import Connection
    from snapmgr.mysql.server.throwaway import ThrowawayServer


_FAILURES_SHOWN = 5


def verify(ctx: Context, entry: Entry, how: Verify | None = None) -> Verification:
    """Try a READY snapshot on a clone and record the result; `how` is the job's verify table, by default the defaults.

    Raises VerificationError when it does not restore to what it should (recorded as failed), MissingRequirementError if
    this machine lacks the server or room (nothing is recorded: that says nothing about the snapshot), LostError if it
    ran full. The clone is gone afterwards.
    """
    how = how or Verify()
    manifest = entry.manifest
    if manifest.source == "directory" and not how.command:
        raise ConfigError(
            f"job {manifest.job} has no check command to verify its snapshots with",
            hint=f'set [job.{manifest.job}.verify] command = ["/path/of/check", "{{}}"]',
        )
    start = time.monotonic()
    trial = _Trial(ctx, manifest, how)
    verification: Verification | None = None
    try:
        with (
            removing_if_lost(ctx, manifest),
            room_wanted(f"try snapshot {manifest.id}"),
            attached(ctx, entry) as lease,
        ):
            try:
                trial.run(lease)
            except (VerificationError, MysqlError) as error:
                trial.failures.append(error.message)
            require_sound_reads(ctx, lease, manifest)
            # Before the clone goes: a clone that cannot be removed does not unsay what was found.
            verification = trial.record(time.monotonic() - start)
    except SnapmgrError as error:
        if verification is not None:
            # Only the clone's removal failed. That a snapshot does not restore is worse, and not to be hidden by it.
            if not trial.failures:
                raise
            ctx.tell(f"warning: its clone could not be removed now: {error.message}")
        elif isinstance(error, NotFoundError | AlteredError):
            gone = "its storage is gone: " if isinstance(error, NotFoundError) else ""
            trial.failures.append(gone + error.message)
            verification = trial.record(time.monotonic() - start)
        else:
            raise
    if trial.failures:
        more = len(trial.failures) - _FAILURES_SHOWN
        raise VerificationError(
            f"snapshot {manifest.id} failed its verification: {'; '.join(trial.failures[:_FAILURES_SHOWN])}"
            + (f"; and {more} more (snapmgr show {manifest.short_id})" if more > 0 else ""),
            hint=f"look at it with: snapmgr mount {manifest.short_id}; rely on another until this is understood",
        )
    return verification


class _Trial:
    """One try of one snapshot, and what it found so far."""

    def __init__(self, ctx: Context, manifest: Manifest, how: Verify) -> None:
        self.found = BinlogFindings()
        self.checks = self.found.checks
        self.failures = self.found.failures
        self._ctx = ctx
        self._manifest = manifest
        self._how = how
        self._deadline = time.monotonic() + how.time_limit_s

    def record(self, duration_s: float) -> Verification:
        """Store what was found so far as the snapshot's verification, and return it."""
        verification = Verification(
            at=datetime.now(UTC),
            result="failed" if self.failures else "passed",
            duration_s=duration_s,
            checks=tuple(self.checks),
            failures=tuple(self.failures),
        )
        self._ctx.catalog.write_verification(self._manifest.id, verification)
        try:
            # Beside the snapshot too, should the state directory be lost: prune keeps the newest that is verified.
            store_note(self._ctx, self._ctx.catalog.load(self._manifest.id))
        except SnapmgrError as error:
            self._ctx.tell(f"warning: the result could not be stored beside the snapshot: {error.message}")
        return verification

    def run(self, lease: Lease) -> None:
        """Try what is attached by `lease`."""
        data = data_path(lease)
        if not data.is_dir():
            self.failures.append(f"the clone has no folder {lease.parts[0].subpath!r}")
        elif self._manifest.source == "directory":
            self._run_command(data)
        else:
            there = copies(lease, self._manifest)
            check_binlog(self._manifest, there, self.found)
            self._run_server(there, data)

    def _run_command(self, data: Path) -> None:
        argv = [word.replace("{}", str(data)) for word in self._how.command]
        self._ctx.tell(f"running {shlex.join(argv)}")
        try:
            self._ctx.runner.run(argv, timeout_s=self._how.time_limit_s)
        except CommandError as error:
            self.failures.append(error.message)
        else:
            self.checks.append(f"{shlex.join(self._how.command)} ended with 0")

    def _run_server(self, there: dict[str, Path], data: Path) -> None:
        recorded = self._manifest.server
        left_s = self._deadline - time.monotonic()
        if make_ready(self._ctx, self._manifest, data, memory_bytes=self._how.memory_bytes, time_limit_s=left_s):
            self.checks.append("the tool applied the redo log")
        with copy_server(
            data,
            recorded,
            program=self._how.server,
            memory_bytes=self._how.memory_bytes,
            options=self._how.options,
            # Absolute paths in the data lead to the live files, unless the clone's are put in their place.
            originals=there,
            scratch_dir=self._ctx.config.scratch_dir,
            time_limit_s=self._deadline - time.monotonic(),
            tell=self._ctx.tell,
        ) as server:
            self.checks.append(f"{server.binary.flavor} {server.binary.version} started and recovered")
            with server.connect() as connection:
                compare_gtid(self._manifest, connection, self.found)
                self._check_tables(server, connection)
            if self.failures and (lacking := server.missing_keys("what is encrypted could not be judged")):
                raise lacking
            if not server.shutdown():
                self.failures.append("the server on the clone did not shut down cleanly")

    def _check_tables(self, server: ThrowawayServer, connection: Connection) -> None:
        how = self._how
        if how.check != "none":
            report = check_tables(
                connection,
                depth=how.check,
                share=how.tables_share,
                seed=self._manifest.id,
                deadline=self._deadline,
                complaints=server.complaints,
                progress=lambda done, total: self._ctx.progress("checking tables", done, total),
            )
            self.checks.append(
                f"CHECK TABLE {how.check.upper()} of {report.tables_checked} of {report.tables_total} tables"
            )
            self.checks.extend(report.notes)
            self.failures.extend(report.failures)
        if how.assertions and server.running:
            wrong = run_assertions(connection, how.assertions, deadline=self._deadline)
            self.checks.append(f"{len(how.assertions) - len(wrong)} of {len(how.assertions)} assertions hold")
            self.failures.extend(wrong)
