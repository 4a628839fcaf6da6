"""Proves that a snapshot restores: runs a throwaway server (or the job's check command) on a writable clone of it."""

from __future__ import annotations

import re
import shlex
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.access.attach import attached, copies, data_path, space_required
from snapmgr.access.note import store_note
from snapmgr.capacity.lost import removing_if_lost, require_sound_reads
from snapmgr.catalog.manifest import Verification
from snapmgr.config.model import Verify
from snapmgr.contract.errors import (
    AlteredError,
    CommandError,
    ConfigError,
    MissingRequirementError,
    NotFoundError,
    SnapmgrError,
    VerificationError,
)
from snapmgr.mysql.connect.client import MysqlError
from snapmgr.mysql.datadir.engines import hidden_tables
from snapmgr.mysql.server.check import check_tables, run_assertions
from snapmgr.mysql.server.throwaway import copy_server
from snapmgr.physical.apply import make_ready
from snapmgr.verify.binlog_check import BinlogFindings, check_binlog, compare_gtid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.catalog.manifest import Lease, Manifest
    from snapmgr.catalog.store import Entry
    from snapmgr.context import Context
    from snapmgr.mysql.connect.client import Connection
    from snapmgr.mysql.server.throwaway import ThrowawayServer


_FAILURES_SHOWN = 5
# The words for ENOSPC and EDQUOT, and SQLite's.
_NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded|disk is full", re.IGNORECASE)
_LACKING = (
    "give the throwaway server the plugins and keys of the source, then verify it again: "
    "docs/explanation/verification.md"
)


def verify(ctx: Context, entry: Entry, how: Verify | None = None) -> Verification:
    """Verify a READY snapshot on a clone and record the result; `how` is the job's verify table, else its defaults.

    Raises VerificationError if it does not restore as expected (recorded as failed), MissingRequirementError if the
    server program, space, or all that is needed to read any table is missing on this machine (not recorded, as it does
    not concern the snapshot), LostError if it overflowed. If some tables could not be looked at, the result is
    "partly": see `incomplete`. The clone is removed afterwards.
    """
    how = how or Verify()
    manifest = entry.manifest
    if manifest.source == "directory" and not how.command:
        raise ConfigError(
            f"job {manifest.job} has no check command, so its snapshots cannot be verified",
            hint=f'set [job.{manifest.job}.verify] command = ["/path/of/check", "{{}}"]',
        )
    start = time.monotonic()
    trial = _Trial(ctx, manifest, how)
    verification: Verification | None = None
    mountable = True
    try:
        with (
            removing_if_lost(ctx, manifest),
            space_required(f"verify snapshot {manifest.id}"),
            # A server changes files everywhere, a check command few or none.
            attached(ctx, entry, overlay=manifest.source == "directory") as lease,
        ):
            try:
                trial.run(lease)
            except (VerificationError, MysqlError) as error:
                trial.failures.append(error.message)
            require_sound_reads(ctx, lease, manifest)
            # Before the clone is removed: if that fails, the result is valid nevertheless.
            verification = trial.record(time.monotonic() - start)
    except SnapmgrError as error:
        if verification is not None:
            # Only the clone's removal failed. It must not hide that the snapshot does not restore, which is worse.
            if not trial.failures:
                raise
            ctx.tell(f"warning: the clone of {manifest.id} could not be removed: {error.message}")
        elif isinstance(error, NotFoundError | AlteredError):
            gone = "its storage is gone: " if isinstance(error, NotFoundError) else ""
            trial.failures.append(gone + error.message)
            mountable = False
            verification = trial.record(time.monotonic() - start)
        else:
            raise
    if trial.failures:
        raise VerificationError(
            f"snapshot {manifest.id} failed its verification: {_shown(trial.failures, manifest)}",
            hint=_advice(manifest, mountable=mountable),
        )
    return verification


def _advice(manifest: Manifest, *, mountable: bool) -> str:
    if mountable:
        return f"examine it: snapmgr mount {manifest.short_id}; rely on another snapshot until the cause is known"
    return f"rely on another snapshot ({manifest.job}@latest); to find out more: snapmgr doctor {manifest.job}"


def incomplete(manifest: Manifest, verification: Verification) -> MissingRequirementError | None:
    """Return the error for a verification that could not look at everything; None for another."""
    if verification.result != "partly":
        return None
    return MissingRequirementError(
        f"snapshot {manifest.id} is only partly verified: {_shown(verification.unchecked, manifest)}", hint=_LACKING
    )


def _shown(sentences: Sequence[str], manifest: Manifest) -> str:
    more = len(sentences) - _FAILURES_SHOWN
    return "; ".join(sentences[:_FAILURES_SHOWN]) + (
        f"; and {more} more (snapmgr show {manifest.short_id})" if more > 0 else ""
    )


class _Trial:
    """One trial of one snapshot, and its findings so far."""

    def __init__(self, ctx: Context, manifest: Manifest, how: Verify) -> None:
        self.found = BinlogFindings()
        self.checks = self.found.checks
        self.failures = self.found.failures
        self.unchecked: list[str] = []
        self._ctx = ctx
        self._manifest = manifest
        self._how = how
        self._deadline = time.monotonic() + how.time_limit_s

    def record(self, duration_s: float) -> Verification:
        """Store the findings so far as the snapshot's verification, and return it."""
        verification = Verification(
            at=datetime.now(UTC),
            result="failed" if self.failures else "partly" if self.unchecked else "passed",
            duration_s=duration_s,
            checks=tuple(self.checks),
            unchecked=tuple(self.unchecked),
            failures=tuple(self.failures),
            notes=tuple(self.found.notes),
        )
        self._ctx.catalog.write_verification(self._manifest.id, verification)
        try:
            # Also beside the snapshot, in case the state directory is lost: prune keeps the newest VERIFIED one.
            store_note(self._ctx, self._ctx.catalog.load(self._manifest.id))
        except SnapmgrError as error:
            self._ctx.tell(f"warning: the result could not be stored beside {self._manifest.id}: {error.message}")
        return verification

    def run(self, lease: Lease) -> None:
        """Check the clone that `lease` has attached."""
        data = data_path(lease)
        if not data.is_dir():
            self.failures.append(f"the clone has no folder {lease.parts[0].subpath!r}")
        elif self._manifest.source == "directory":
            self._run_command(data)
        else:
            folders = copies(lease, self._manifest)
            check_binlog(self._manifest, folders, self.found)
            self._run_server(folders, data)

    def _run_command(self, data: Path) -> None:
        argv = [word.replace("{}", str(data)) for word in self._how.command]
        self._ctx.tell(f"running {shlex.join(argv)}")
        try:
            self._ctx.runner.run(argv, timeout_s=self._how.time_limit_s)
        except CommandError as error:
            if _NO_SPACE.search(error.message):
                # This says nothing about the snapshot.
                raise MissingRequirementError(
                    error.message, hint="free space for the changes of the command, and verify the snapshot again"
                ) from None
            self.failures.append(error.message)
        else:
            self.checks.append(f"{shlex.join(self._how.command)} exited with status 0")

    def _run_server(self, folders: dict[str, Path], data: Path) -> None:
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
            # Absolute paths in the data lead to the live files, unless the clone's folders are mounted over those.
            originals=folders,
            scratch_dir=self._ctx.config.scratch_dir,
            time_limit_s=self._deadline - time.monotonic(),
            tell=self._ctx.tell,
            encrypted_logs=self.found.encrypted,
        ) as server:
            self.checks.append(f"{server.binary.flavor} {server.binary.version} started and recovered")
            with server.connect() as connection:
                compare_gtid(self._manifest, connection, self.found)
                self._check_tables(server, connection, data)
            if not server.shutdown():
                self.failures.append("the server on the clone did not shut down cleanly")

    def _check_tables(self, server: ThrowawayServer, connection: Connection, data: Path) -> None:
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
            self.found.notes.extend(report.notes)
            self.unchecked.extend(report.unchecked)
            if server.binary.flavor == "mariadb" and server.running:
                hidden = hidden_tables(connection, data)
                self.unchecked.extend(f"{path}: its engine ARCHIVE is not loaded" for path in hidden)
            self.failures.extend(report.failures)
            if self.unchecked and not report.user_tables_checked and not self.failures:
                why = f"; {server.no_keys}" if server.no_keys and server.missing_keys("") else ""
                raise MissingRequirementError(
                    f"no table of the users of {self._manifest.id} could be looked at: "
                    f"{_shown(self.unchecked, self._manifest)}{why}",
                    hint=_LACKING,
                )
        if how.assertions and server.running:
            wrong, untried = run_assertions(
                connection, how.assertions, deadline=self._deadline, unchecked=self.unchecked
            )
            held = len(how.assertions) - len(wrong) - len(untried)
            if held:
                self.checks.append(f"{held} of {len(how.assertions)} assertions hold")
            self.failures.extend(wrong)
            self.unchecked.extend(untried)
