"""``snapmgr prepare --tune``: measures which settings prepare fastest, and writes the report."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from snapmgr.cli.output import format_table, print_lines
from snapmgr.cli.signals import Interrupted
from snapmgr.cli.toolbackup import is_path, parse_mount_options
from snapmgr.contract.errors import EXIT_OK, ConfigError, InterruptedRunError, MissingRequirementError, SnapmgrError
from snapmgr.contract.units import format_duration, format_size, parse_duration

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.cli.session import Session
    from snapmgr.cli.toolbackup import PrepareOptions
    from snapmgr.config.model import Job
    from snapmgr.context import Context
    from snapmgr.physical.tuning.storagebench import StorageBench
    from snapmgr.physical.tuning.tune import Tuning

DEFAULT_TIME = "30m"
_OPTION = "--tune"


class TunableCommand(click.Command):
    """Takes a bare ``--tune`` for ``--tune=30m``: click would take the next word for its value."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Complete the option, then parse as usual."""
        completed: list[str] = []
        for place, word in enumerate(args):
            if word == "--":
                completed += args[place:]
                break
            joined = completed[-1:] == [_OPTION] and _is_duration(word)
            if completed[-1:] == [_OPTION]:
                completed[-1] = f"{_OPTION}={word if joined else DEFAULT_TIME}"
            if not joined:
                completed.append(word)
        if completed[-1:] == [_OPTION]:
            completed[-1] = f"{_OPTION}={DEFAULT_TIME}"
        return super().parse_args(ctx, completed)


def _is_duration(word: str) -> bool:
    try:
        parse_duration(word)
    except ValueError:
        return False
    return True


def tune_prepare(
    session: Session, name: str, options: PrepareOptions, *, time_s: float, report: Path | None, dry_run: bool
) -> int:
    """Tune the prepare of a backup folder, or of a physical job's snapshots by one of them; return the exit code."""
    from snapmgr.physical.tuning.tune import tune

    with _source(session, name) as (ctx, source, job):
        if options.strategy not in {None, "storage"} or options.result is not None:
            raise click.UsageError("--tune is about --strategy storage, and keeps no result.")
        if report is not None and os.path.lexists(report):
            raise ConfigError(f"{report} exists", hint="tune overwrites nothing: name another file (--report)")
        bench, tuning = _begin(ctx, source, options, time_s, job)
        if dry_run:
            return _show_plan(session, tuning)
        target = report or Path(f"snapmgr-tune-{_plain(tuning.name)}-{datetime.now(UTC):%Y%m%dT%H%M%S}.html")
        _require_writable(target)
        error: SnapmgrError | None = None
        try:
            tune(bench, tuning, tell=session.console.tell)
        except Interrupted as signal:
            error = InterruptedRunError(str(signal))
            raise
        except SnapmgrError as failure:
            error = failure
            raise
        finally:
            # After a failure the user may want to read it.
            if not isinstance(error, SnapmgrError) or isinstance(error, InterruptedRunError):
                with suppress(FileNotFoundError):
                    os.unlink(bench.log)
            # Also after an interruption or a failure: each run took long.
            if tuning.measured:
                _conclude(session, tuning, source, target, job=job.name if job is not None else None, error=error)
        return EXIT_OK


@contextmanager
def _source(session: Session, name: str) -> Iterator[tuple[Context, str, Job | None]]:
    """Yield the folder of a backup while it can be read; with the job if it is a snapshot of one."""
    from snapmgr.access.attach import reached

    if is_path(name):
        yield session.stateless_context(), os.path.realpath(name), None
        return
    ctx = session.context()
    entry = ctx.resolve(name)
    entry.manifest.require_ready("prepared")
    job = session.config().jobs.get(entry.manifest.job)
    if entry.manifest.source != "physical" or job is None or job.staging is None:
        raise ConfigError(
            f"{entry.manifest.id} is not a snapshot of a configured physical job",
            hint="only prepares of tool backups can be tuned; or name a backup folder by its path",
        )
    with reached(ctx, entry, why="prepare") as source:
        yield ctx, source, job


def _begin(
    ctx: Context, source: str, options: PrepareOptions, time_s: float, job: Job | None
) -> tuple[StorageBench, Tuning]:
    from snapmgr.access.cloner import find_cloner
    from snapmgr.contract.abilities import FolderCloning, Remounting
    from snapmgr.physical.prepare.backupfolder import inspect
    from snapmgr.physical.prepare.inplace import choose_memory
    from snapmgr.physical.prepare.places import memory_available
    from snapmgr.physical.tools.choose import tool_for
    from snapmgr.physical.tuning.limits import limits
    from snapmgr.physical.tuning.rungs import RungSettings
    from snapmgr.physical.tuning.storagebench import StorageBench
    from snapmgr.physical.tuning.tune import Tuning

    client, warm_up = parse_mount_options(options.mount_options)
    backup = inspect(source)
    # A snapshot lies in the store of its backend, which is not a volume to any backend.
    beside = str(job.staging) if job is not None else None
    storage: object = find_cloner(ctx, beside or source)
    if not isinstance(storage, FolderCloning):
        raise MissingRequirementError(
            f"the storage of {source} cannot clone a folder, so there is nothing to tune",
            hint="prepare it on local scratch: snapmgr prepare PATH --strategy scratch",
        )
    remounting = storage if isinstance(storage, Remounting) else None
    if client is not None and remounting is None:
        raise ConfigError(
            "this storage has no client program that can be mounted with other options", hint="leave --mount-option out"
        )
    name = getattr(storage, "name", "")
    cache_root = str(ctx.config.backends.get(name, {}).get("cache_root", "/var/tmp"))  # noqa: S108 - the backend's own
    scratch = str(os.path.abspath(options.scratch or ctx.config.scratch_dir))
    os.makedirs(scratch, mode=0o755, exist_ok=True)
    tool = tool_for(backup.info)
    data_bytes = sum(backup.sizes.values())
    # The first rung is what `prepare` does without options.
    memory_bytes = options.use_memory_bytes or choose_memory(backup.redo_bytes, memory_available()) >> 20 << 20
    bench = StorageBench(
        source=source,
        beside=beside or os.path.dirname(source),
        info=backup.info,
        tool=tool,
        cloning=storage,
        remounting=remounting,
        data_bytes=data_bytes,
        scratch_dir=scratch,
        cache_root=cache_root,
        log=os.path.join(scratch, f"snapmgr-tune-{os.getpid()}.log"),
        scratch_memory_bytes=memory_bytes,
        tell=ctx.tell,
    )
    start = RungSettings(
        use_memory_bytes=memory_bytes,
        writeback=client.writeback if client else False,
        upload_delay_s=client.upload_delay_s if client else 0.0,
        cache_bytes=client.cache_bytes if client else None,
        cache_dir=client.cache_dir if client else None,
        warm_up=warm_up,
        extra_mount=client.extra if client else (),
        extra_tool=options.tool_options,
    )
    tuning = Tuning(
        name=job.name if job is not None else os.path.basename(source),
        data_bytes=data_bytes,
        redo_bytes=backup.redo_bytes,
        tool=f"{backup.info.tool} {backup.info.tool_version}".strip(),
        limits=limits(
            data_bytes, private=remounting is not None, io_threads=tool.name == "xtrabackup", cache_root=cache_root
        ),
        time_s=time_s,
        start=start,
    )
    return bench, tuning


def _show_plan(session: Session, tuning: Tuning) -> int:
    from snapmgr.physical.tuning.ladder import moves

    found = [str(move.settings) for move in moves(tuning.start, tuning.limits) if not move.joined]
    lines = [
        f"would measure for {format_duration(tuning.time_s)} at most how long {tuning.name} takes to prepare "
        f"({format_size(tuning.data_bytes)}), on clones, first with: {tuning.start}",
        "the bottleneck of the first rung decides the next one; possible rungs are:",
        *(f"  {one}" for one in found),
    ]
    return session.report(lines, dry_run=True, first=str(tuning.start), next=found, tuning=None)


def _conclude(
    session: Session, tuning: Tuning, source: str, target: Path, *, job: str | None, error: SnapmgrError | None
) -> None:
    """Write the report, and print the result."""
    from snapmgr.physical.tuning.outcome import (
        arguments,
        command_line,
        document,
        lines,
        quickest_arguments,
        quickest_table,
        scratch_is_quickest,
        summary,
    )
    from snapmgr.physical.tuning.page import render
    from snapmgr.system.files import replace_file

    now = tuning.standing
    written: str | None = str(target)
    try:
        page = render(tuning, source=source, job=job, made_at=datetime.now(UTC))
        replace_file(target, page.encode(), mode=0o644)
    except OSError as failure:
        written = None
        session.console.warn(f"the report {target} could not be written: {failure.strerror}")
    if session.json:
        found = document(tuning)
        code = error.exit_code if error is not None else 1 if sys.exc_info()[0] else EXIT_OK
        session.document(code, error, dry_run=False, source=source, job=job, report=written, tuning=found)
        return
    for line in format_table(["TIME", "CACHE", "RUNG", "VERDICT"], lines(tuning)):
        session.console.tell(line)
    for line in summary(tuning):
        session.console.tell(line)
    if written is not None:
        session.console.tell(f"report: {written}")
    if now is None:
        return
    if scratch_is_quickest(tuning):
        slower = command_line(source, arguments(now.best))
        session.console.tell(f"scratch was quickest; to work in the storage all the same: {slower}")
    if job is not None:
        session.console.tell(f"for the job, in place of its table [job.{job}.prepare]:")
        print_lines(quickest_table(tuning, job, now.best).splitlines())
    else:
        session.console.tell("to prepare like this:")
        print_lines([command_line(source, quickest_arguments(tuning, now.best))])


def _require_writable(target: Path) -> None:
    folder = target.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"the report cannot be written to {folder}", hint="name another file (--report)")


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "-" for letter in name).strip(".") or "backup"
