"""Examines backends and jobs: requirements, server, account, storage. Changes and locks nothing."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from snapmgr.capacity.read import read_headroom
from snapmgr.capacity.series import WHEN_FULL, short_of
from snapmgr.config.plugins import list_plugins, make_backend
from snapmgr.contract.errors import SnapmgrError, StorageError
from snapmgr.contract.units import format_size
from snapmgr.doctor.account import grant_statements, missing_privileges, needed_privileges, read_grants, replicates
from snapmgr.doctor.collect import pools_near
from snapmgr.doctor.finding import Finding, of_error
from snapmgr.mysql.connect.abilities import probe_abilities
from snapmgr.mysql.connect.client import Credentials, connect
from snapmgr.mysql.connect.identity import identify, program_of
from snapmgr.mysql.lock.stopped import server_process
from snapmgr.mysql.server.program import find_server, server_for
from snapmgr.source.locate import locate_source
from snapmgr.source.volumes import name_excluded
from snapmgr.system.blockdev import find_target
from snapmgr.system.command import CommandRunner
from snapmgr.system.host import regression_side
from snapmgr.system.mount import KernelMounter
from snapmgr.system.probe import require_answer, require_writable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapmgr.config.model import Config, Job
    from snapmgr.context import Context
    from snapmgr.contract.records import Pool
    from snapmgr.doctor.finding import Level
    from snapmgr.mysql.server.program import ServerBinary
    from snapmgr.source.located import SnapshotSource


def examine_jobs(ctx: Context, jobs: list[Job]) -> tuple[list[Finding], list[Pool]]:
    """Examine the backends and `jobs`; return the findings, and the pools that hold or may hold their snapshots.

    `snapmgr.doctor.collect` and `snapmgr.doctor.diagnose` examine the state directory and these pools.
    """
    findings = [*examine_backends(ctx.config), *_examine_folders(ctx)]
    pools: list[Pool] = []
    if not jobs:
        findings.append(Finding(area="config", subject="", level="note", what="no job is configured"))
    for job in jobs:
        known = len(pools)
        findings += _examine_job(ctx, job, pools)
        if len(pools) == known:
            pools += pools_near(ctx, job)
    return findings, pools


def examine_backends(config: Config | None) -> list[Finding]:
    """Return for each installed backend whether it can work on this machine.

    The level is "missing" only if a job names the backend, or if no backend works: nobody needs all of them.
    """
    named = {job.backend for job in config.jobs.values()} if config is not None else set()
    runner, mounter = CommandRunner(), KernelMounter()
    findings: list[Finding] = []
    works = False
    for plugin in list_plugins():
        try:
            if plugin.error is not None:
                raise plugin.error
            table = config.backends.get(plugin.name, {}) if config is not None else {}
            reasons = make_backend(plugin.name, table, runner, mounter).missing()
        except SnapmgrError as error:
            findings.append(of_error("backend", plugin.name, error))
            continue
        works = works or not reasons
        if not reasons:
            what = f"can work here (of {plugin.distribution})"
            findings.append(Finding(area="backend", subject=plugin.name, level="ok", what=what))
        findings += [
            Finding(
                area="backend",
                subject=plugin.name,
                level="missing" if plugin.name in named else "note",
                what=reason.what,
                hint=reason.hint,
            )
            for reason in reasons
        ]
    if not works:
        hint = "install the requirements of one of them" if findings else "install snapmgr again, with its backends"
        what = "no backend can work here"
        findings.append(Finding(area="backend", subject="", level="missing", what=what, hint=hint))
    return findings


def _examine_folders(ctx: Context) -> Iterator[Finding]:
    """Yield whether nothing can be written to the state directory, or to the one that snapshots are mounted in."""
    for path in dict.fromkeys((ctx.catalog.path, ctx.config.scratch_dir)):
        try:
            require_writable(path)
        except StorageError as error:
            yield of_error("state", str(path), error)


def _examine_job(ctx: Context, job: Job, pools: list[Pool]) -> Iterator[Finding]:
    """Yield all findings about one job; add the pools of its storage to `pools`."""
    healthy = True
    if job.source == "mysql" and job.quiesce != "stopped":
        for finding in _examine_server(job):
            healthy = healthy and finding.level in ("ok", "note")
            yield finding
    elif job.source == "mysql":
        yield from _examine_stopped(job)
    elif job.source == "physical":
        for finding in _examine_tool(ctx, job):
            healthy = healthy and finding.level in ("ok", "note")
            yield finding
    if healthy:
        # Otherwise it would only report the same problems again.
        yield from _examine_storage_of(ctx, job, pools)
    yield from _examine_plans(job)


def _finding(job: Job, level: Level, what: str, hint: str | None = None) -> Finding:
    return Finding(area="job", subject=job.name, level=level, what=what, hint=hint)


def _examine_server(job: Job) -> Iterator[Finding]:
    credentials = Credentials(socket=job.socket, defaults_file=job.defaults_file, user=job.user)
    try:
        with connect(credentials) as connection:
            account = str(connection.value("SELECT CURRENT_USER()"))
            yield _finding(job, "ok", f"logged in as {account} at {connection.socket}")
            if job.defaults_file is not None:
                yield _finding(job, "ok", f"nobody else may read {job.defaults_file}")
            identity = identify(connection)
            server = f"{identity.flavor} {identity.version} (pid {identity.pid})"
            yield _finding(job, "ok", f"{server} has the datadir {identity.datadir} open")
            abilities = probe_abilities(connection, identity)
            abilities.refuse_cluster()
            replica = replicates(connection, abilities)
            needed = needed_privileges(job, abilities, replica=replica)
            missing = missing_privileges(read_grants(connection), needed)
            method = connection.variables("innodb_flush_method").get("innodb_flush_method", "")
    except SnapmgrError as error:
        yield of_error("job", job.name, error)
        return
    if missing:
        yield _finding(
            job,
            "missing",
            f"{account} is missing privileges: {', '.join(map(str, missing))}",
            # A GRANT on the replica would be in its own binary log only, and MySQL's GTID sets would diverge.
            f"as root{', on the source' if replica else ''}: {grant_statements(account, missing)}",
        )
    else:
        yield _finding(job, "ok", f"{account} has all privileges that a backup needs")
    yield from _examine_kernel(job, identity.datadir, method)
    explicit, ran = job.verify.server, program_of(identity.pid)
    yield from _examine_program(job, lambda: find_server(identity.flavor, explicit, wrote=identity.version, ran=ran))


def _examine_kernel(job: Job, datadir: str, flush_method: str) -> Iterator[Finding]:
    """Report a kernel that is slow for this server's settings: see `snapmgr.system.host.regression_side`."""
    release = os.uname().release
    with suppress(SnapmgrError, ValueError):
        slow = flush_method.startswith("O_DIRECT") and regression_side(release) == "within"
        if slow and find_target(datadir).mount.fs_type == "ext4":
            yield _finding(
                job,
                "note",
                f"kernel {release} has the ext4 regression of Linux 4.9 to 5.5, unless the distribution has fixed it: "
                f"with innodb_flush_method={flush_method}, writes in place block reads of the same file",
                "measure it: snapmgr bench run innodb-io; newer kernels and XFS do not have it",
            )


def _examine_stopped(job: Job) -> Iterator[Finding]:
    datadir = str(job.datadir)
    try:
        pid = server_process(datadir)
    except SnapmgrError as error:
        yield of_error("job", job.name, error)
        return
    if pid is None:
        yield _finding(job, "ok", f"level stopped: no server runs on {datadir}")
    else:
        yield _finding(job, "note", f"a server (pid {pid}) runs on {datadir} now", "stop it for the backup")
    yield from _examine_program(job, lambda: server_for(None, datadir, job.verify.server))


def _examine_tool(ctx: Context, job: Job) -> Iterator[Finding]:
    from snapmgr.physical.run import plan_tool_backup  # noqa: PLC0415 - for few jobs
    from snapmgr.physical.tools.xtrabackup import UNTRIED  # noqa: PLC0415 - the same

    try:
        plan = plan_tool_backup(ctx, job)
    except SnapmgrError as error:
        yield of_error("job", job.name, error)
        # The error names at most one privilege; this names all of them, with the statement.
        yield from (one for one in _examine_server(job) if one.level == "missing")
        return
    who = plan.live.identity
    yield _finding(job, "ok", f"{who.flavor} {who.version} (pid {who.pid}) has the datadir {who.datadir} open")
    yield _finding(job, "ok", f"the next backup: {plan.words}")
    if plan.tool.name == "xtrabackup":
        yield _finding(job, "note", UNTRIED, 'verify each backup (after_backup = ["verify"]), or use tool = "clone"')
    yield from _examine_program(
        job, lambda: find_server(who.flavor, job.verify.server, wrote=who.version, ran=program_of(who.pid))
    )


def _examine_program(job: Job, find: Callable[[], ServerBinary]) -> Iterator[Finding]:
    """Report the server program that a verification would start; `find` chooses one that can open the data."""
    try:
        binary = find()
    except SnapmgrError as error:
        finding = of_error("job", job.name, error)
        needed = "verify" in job.after_backup
        what = f"cannot be verified here: {finding.what}"
        yield _finding(job, finding.level if needed else "note", what, finding.hint)
    else:
        yield _finding(job, "ok", f"can be verified by {binary.flavor} {binary.version}")


def _examine_storage_of(ctx: Context, job: Job, pools: list[Pool]) -> Iterator[Finding]:
    try:
        source = locate_source(ctx, job)
        atomicity = source.backend.capabilities(source.volumes).atomicity
    except SnapmgrError as error:
        yield of_error("job", job.name, error)
        return
    if source.choice is not None:
        yield _finding(job, "ok", f"level {source.choice.name}: {source.choice.why}")
    pools.extend(volume.pool for volume in source.volumes)
    try:
        for volume in source.volumes:
            require_answer(volume.path)
    except SnapmgrError as error:
        yield of_error("job", job.name, error)
        return
    why = "in one instant" if atomicity == "volume" else "file by file"
    chosen = "chosen automatically" if job.backend == "auto" else "chosen by the job"
    for volume in source.volumes:
        yield _finding(job, "ok", f"{volume.path}: {source.backend.name} ({chosen}) takes volume {volume.shown} {why}")
    yield from (_finding(job, "note", what) for what in _caveats(source))
    try:
        yield from _examine_headroom(ctx, job, source)
    except SnapmgrError as error:
        yield of_error("job", job.name, error)


def _caveats(source: SnapshotSource) -> Iterator[str]:
    for path in source.absent:
        yield f"not in a snapshot: the logs in {path}, which {source.backend.name} cannot snapshot"
    for path in name_excluded(source.shares, source.absent):
        yield f"not in a snapshot: {path} (a nested subvolume or mount)"
    yield from source.warnings


def _examine_headroom(ctx: Context, job: Job, source: SnapshotSource) -> Iterator[Finding]:
    now = datetime.now(UTC)
    readings = read_headroom(ctx, job, source.volumes, now)
    for one in readings:
        series = one.series
        used_bytes = series.last.used_bytes if series.last is not None else 0
        what = f"{series.name}: {format_size(used_bytes)} of {format_size(series.size_bytes)} used"
        if one.forecast.full_at is not None:
            what += f", {one.forecast.words(now)}"
        if one.alarm is None:
            yield _finding(job, "ok", what)
            continue
        if series.wanted_bytes:
            what += f"; the next snapshot takes {format_size(series.wanted_bytes)}"
        what += f"; once it is full, {WHEN_FULL[series.when_full]}"
        yield _finding(job, "problem", what, "enlarge it, or prune; see docs/how-to/watch-capacity.md")
    for what in short_of(job.free_min, [one.series for one in readings]):
        hint = f"snapmgr prune {job.name}, delete snapshots or files, add space, or lower free_min of the job"
        yield _finding(job, "problem", f"the next backup refuses, unless a prune is enough: {what}", hint)


def _examine_plans(job: Job) -> Iterator[Finding]:
    if not any((getattr(job.retention, name) or 0) > 0 for name in job.retention.__struct_fields__):
        yield _finding(job, "note", "no retention rule: every snapshot is kept forever", "set keep-… in its retention")
    if job.source == "directory" and job.verify.command:
        program = job.verify.command[0]
        if shutil.which(program) is None:
            level: Level = "missing" if "verify" in job.after_backup else "note"
            what = f"its check command {program} is missing"
            yield _finding(job, level, what, "install it, or correct verify.command")
