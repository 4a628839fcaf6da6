"""Proving that a snapshot restores: a throwaway server (or the job's check command) on a writable clone of it."""

from __future__ import annotations

import shlex
import time
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Literal

from snapmgr.config import Verify
from snapmgr.errors import CommandError, ConfigError, NotFoundError, VerificationError
from snapmgr.jobs.attach import attached, data_path
from snapmgr.manifest import Verification
from snapmgr.mysql.check import check_tables, run_assertions
from snapmgr.mysql.server import find_server, throwaway

if TYPE_CHECKING:
    from snapmgr.catalog import Entry
    from snapmgr.jobs.context import Context
    from snapmgr.manifest import Lease, Manifest, Position
    from snapmgr.mysql.server import ThrowawayServer


def verify(ctx: Context, entry: Entry, how: Verify | None = None) -> Verification:
    """Try a READY snapshot on a clone and record the result; `how` is the job's verify table, by default the defaults.

    Raises VerificationError when it does not restore to what it should (recorded as failed), LackingError if this machine
    lacks the server (nothing is recorded: that says nothing about the snapshot). The clone is gone afterwards.
    """
    how = how or Verify()
    manifest = entry.manifest
    if manifest.source == "directory" and not how.command:
        raise ConfigError(
            f"job {manifest.job} has no check command to verify its snapshots with",
            hint=f'set [job.{manifest.job}.verify] command = ["/path/of/check", "{{}}"]',
        )
    start = time.monotonic()
    checks: list[str] = []
    failures: list[str] = []
    try:
        with attached(ctx, entry) as lease:
            data = data_path(lease)
            if not data.is_dir():
                failures.append(f"the clone has no folder {manifest.members[0].subpath!r}")
            elif manifest.source == "directory":
                _run_command(ctx, how, data, checks, failures)
            else:
                _run_server(ctx, manifest, how, lease, checks, failures)
    except NotFoundError as error:
        failures.append(f"its storage is gone: {error.message}")
    except VerificationError as error:
        failures.append(error.message)
    verification = Verification(
        at=datetime.now(UTC),
        result="failed" if failures else "passed",
        duration_s=time.monotonic() - start,
        checks=tuple(checks),
        failures=tuple(failures),
    )
    ctx.catalog.write_verification(manifest.id, verification)
    if failures:
        raise VerificationError(
            f"snapshot {manifest.id} failed its verification: {'; '.join(failures[:5])}"
            + (f" and {len(failures) - 5} more" if len(failures) > 5 else ""),
            hint=f"look at it with: snapmgr mount {manifest.short_id}; restore from another one until this is understood",
        )
    return verification


def _run_command(ctx: Context, how: Verify, data: Path, checks: list[str], failures: list[str]) -> None:
    argv = [word.replace("{}", str(data)) for word in how.command]
    ctx.tell(f"running {shlex.join(argv)}")
    try:
        ctx.runner.run(argv, timeout_s=how.time_limit_s)
    except CommandError as error:
        failures.append(error.message)
    else:
        checks.append(f"{shlex.join(how.command)} ended with 0")


def _run_server(
    ctx: Context, manifest: Manifest, how: Verify, lease: Lease, checks: list[str], failures: list[str]
) -> None:
    data = data_path(lease)
    deadline = time.monotonic() + how.time_limit_s
    if manifest.position is not None:
        _check_binlog(manifest, data, checks, failures)
    binary = find_server(_flavor(manifest, data), how.server)
    with TemporaryDirectory(prefix="v", dir=ctx.config.scratch_dir) as run_dir:
        ctx.tell(f"starting {binary.flavor} {binary.version} on a clone")
        with throwaway(
            binary,
            data,
            settings=manifest.server.settings if manifest.server else {},
            memory_bytes=how.memory_bytes,
            run_dir=Path(run_dir),
            options=how.options,
            originals=_originals(manifest, lease),
            time_limit_s=deadline - time.monotonic(),
        ) as server:
            checks.append(f"{binary.flavor} {binary.version} started and recovered")
            _examine(ctx, manifest, how, server, deadline, checks, failures)


def _examine(
    ctx: Context,
    manifest: Manifest,
    how: Verify,
    server: ThrowawayServer,
    deadline: float,
    checks: list[str],
    failures: list[str],
) -> None:
    with server.connect() as connection:
        if manifest.position is not None and manifest.position.gtid:
            gtid = str(connection.value("SELECT @@GLOBAL.gtid_binlog_pos") or "")
            if gtid == manifest.position.gtid:
                checks.append(f"its GTID is the recorded one ({gtid})")
            else:
                failures.append(f"its GTID is {gtid or 'empty'}, the recorded one is {manifest.position.gtid}")
        if how.check != "none":
            report = check_tables(
                connection,
                depth=how.check,
                share=how.tables_share,
                seed=manifest.id,
                deadline=deadline,
                complaints=server.complaints,
                progress=lambda done, total: ctx.progress("checking tables", done, total),
            )
            checks.append(f"CHECK TABLE {how.check.upper()} of {report.tables_checked} of {report.tables_total} tables")
            failures.extend(report.failures)
        if how.assertions:
            wrong = run_assertions(connection, how.assertions)
            checks.append(f"{len(how.assertions) - len(wrong)} of {len(how.assertions)} assertions hold")
            failures.extend(wrong)
    if not server.shutdown():
        failures.append("the server on the clone did not shut down cleanly")


def _check_binlog(manifest: Manifest, data: Path, checks: list[str], failures: list[str]) -> None:
    """Under the lock nothing was written, so the snapshot's last binlog ends exactly at the recorded offset."""
    position: Position | None = manifest.position
    if position is None or manifest.server is None or not manifest.server.log_bin:
        return
    path = data / Path(manifest.server.log_bin).parent / position.file
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        failures.append(f"the recorded binlog {position.file} is not in it")
        return
    if size == position.offset:
        checks.append(f"its binlog ends at the recorded position ({position.file}:{position.offset})")
    else:
        failures.append(f"its binlog {position.file} has {size} bytes, the recorded position is {position.offset}")


def _originals(manifest: Manifest, lease: Lease) -> dict[str, str]:
    """Return the folders that the source server knew, each with its place in the clone."""
    places = manifest.server.places if manifest.server else {}
    return {original: str(Path(lease.point, subpath)) for original, subpath in places.items()}


def _flavor(manifest: Manifest, data: Path) -> Literal["mariadb", "mysql"]:
    if manifest.server is not None:
        return manifest.server.flavor
    # Taken from a stopped server: Aria's control file is MariaDB's alone.
    return "mariadb" if (data / "aria_log_control").exists() else "mysql"
