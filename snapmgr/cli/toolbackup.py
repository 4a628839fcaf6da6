"""``snapmgr prepare`` of a tool backup: a folder, or a snapshot that is still raw."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from msgspec import Struct
from msgspec.structs import replace

from snapmgr.cli.output import print_lines
from snapmgr.contract.errors import EXIT_OK
from snapmgr.contract.units import format_duration, format_size, parse_duration, parse_size

if TYPE_CHECKING:
    from snapmgr.catalog.store import Entry
    from snapmgr.cli.session import Session
    from snapmgr.config.model import Config, Prepare
    from snapmgr.context import Context
    from snapmgr.contract.backend import Backend
    from snapmgr.contract.records import ClientOptions
    from snapmgr.physical.prepare.order import PreparedBackup, PrepareOrder, PreparePlan

STRATEGIES = ("auto", "storage", "scratch", "overlay")
RESULTS = ("scratch", "storage")


class PrepareOptions(Struct, frozen=True, kw_only=True):
    """The options of the command line for preparing a tool backup."""

    strategy: str | None
    result: str | None
    use_memory_bytes: int | None
    tool_options: tuple[str, ...]
    mount_options: tuple[str, ...]
    scratch: Path | None

    def completed(self, table: Prepare) -> PrepareOptions:
        """Return these options, completed from a job's table ``prepare``."""
        mount = [
            option
            for option, wanted in (
                ("writeback", table.writeback),
                (f"upload-delay={table.upload_delay_s}s", table.upload_delay_s),
                (f"cache-size={table.cache_size_bytes}", table.cache_size_bytes),
                (f"cache-dir={table.cache_dir}", table.cache_dir),
                ("warm-up", table.warm_up),
            )
            if wanted
        ]
        strategy = self.strategy or table.strategy
        return replace(
            self,
            strategy=strategy,
            use_memory_bytes=self.use_memory_bytes or table.use_memory_bytes,
            tool_options=self.tool_options or table.tool_options,
            # They are for a clone in the storage; other ways ignore them.
            mount_options=self.mount_options or (*mount, *table.mount_options) if strategy == "storage" else (),
        )

    def given(self) -> list[str]:
        """Return the given options that are for tool backups only."""
        return [
            name
            for name, value in (
                ("--strategy", self.strategy),
                ("--result", self.result),
                ("--tool-option", self.tool_options),
                ("--mount-option", self.mount_options),
                ("--scratch", self.scratch),
            )
            if value
        ]


def is_path(text: str) -> bool:
    """Whether an argument is a path rather than a snapshot's name, which never holds a slash."""
    return "/" in text or text in {".", ".."}


def parse_mount_options(options: tuple[str, ...]) -> tuple[ClientOptions | None, bool]:
    """Given options such as "writeback" and "cache-size=4G", return how to mount, and whether to warm up.

    None: no private mount. Raises click.UsageError.
    """
    from snapmgr.contract.records import ClientOptions

    if not options:
        return None, False
    known: dict[str, Any] = {}
    extra: list[str] = []
    wrong: list[str] = []
    for option in options:
        name, equals, value = option.removeprefix("--").partition("=")
        try:
            match name:
                case "writeback" | "warm-up" if not equals:
                    known[name] = True
                case "upload-delay":
                    known[name] = parse_duration(value)
                case "cache-size":
                    known[name] = parse_size(value)
                case "cache-dir" if value.startswith("/"):
                    known[name] = value
                case "writeback" | "warm-up" | "cache-dir" | "":
                    wrong.append(option)
                case _:
                    extra += [f"--{name}", value] if equals else [f"--{name}"]
        except ValueError as error:
            raise click.UsageError(f"--mount-option {option}: {error}") from None
    if wrong:
        raise click.UsageError(f"--mount-option {wrong[0]}: writeback and warm-up have no value, cache-dir=/PATH has.")
    client = ClientOptions(
        writeback=known.get("writeback", False),
        upload_delay_s=known.get("upload-delay", 0.0),
        cache_bytes=known.get("cache-size"),
        cache_dir=known.get("cache-dir"),
        extra=tuple(extra),
    )
    return client, known.get("warm-up", False)


def make_order(source: str, folder: Path | None, options: PrepareOptions, config: Config) -> PrepareOrder:
    """Return the order to prepare the backup at `source`. Raises click.UsageError."""
    from snapmgr.physical.prepare.inplace import ApplySettings
    from snapmgr.physical.prepare.order import PrepareOrder

    client, warm_up = parse_mount_options(options.mount_options)
    if client is not None and options.strategy in {"scratch", "overlay"}:
        raise click.UsageError(f"--mount-option goes with --strategy storage, not with {options.strategy}.")
    if options.strategy in {"storage", "overlay"} and options.result == "scratch":
        raise click.UsageError(f"--strategy {options.strategy} leaves its result in the storage.")
    strategy = None if options.strategy == "auto" else options.strategy
    if client is not None:
        strategy = "storage"
    return PrepareOrder(
        source=source,
        target=os.path.abspath(folder) if folder is not None else None,
        strategy=strategy,  # type: ignore[arg-type] # click checks it
        result=options.result,  # type: ignore[arg-type] # the same
        scratch=os.path.abspath(options.scratch or config.scratch_dir),
        settings=ApplySettings(
            use_memory_bytes=options.use_memory_bytes or 0,
            tool_options=options.tool_options,
            client=client,
            warm_up=warm_up,
        ),
    )


def prepare_path(session: Session, path: str, folder: Path | None, options: PrepareOptions, *, dry_run: bool) -> int:
    """Prepare the backup folder at `path`, or print the plan; return the exit code."""
    from snapmgr.access.cloner import find_cloner
    from snapmgr.physical.prepare.backupfolder import inspect

    source = os.path.abspath(path)
    ctx = session.stateless_context()
    order = make_order(source, folder, options, ctx.config)
    # First of all: without a backup no storage is needed.
    inspect(source)
    planned, ready = _prepare(ctx, order, find_cloner(ctx, source), dry_run=dry_run)
    return _show(session, planned, ready, source=source)


def prepare_snapshot_backup(
    session: Session, ctx: Context, entry: Entry, folder: Path | None, options: PrepareOptions, *, dry_run: bool
) -> int:
    """Prepare a copy of a physical backup's snapshot, or print the plan; return the exit code.

    The job's table ``prepare`` completes the options of the command line.
    """
    from snapmgr.physical.snapshots import placed, reached_backup

    manifest = entry.manifest
    manifest.require_ready("prepared")
    job = session.config().jobs.get(manifest.job)
    if job is None:
        session.console.warn(f"job {manifest.job} is not configured any more: preparing with the defaults")
    wanted = options.completed(job.prepare) if job is not None else options
    beside = job.staging if job is not None else None
    with reached_backup(ctx, entry) as (source, storage):
        order = placed(make_order(source, folder, wanted, ctx.config), beside, manifest.short_id)
        planned, ready = _prepare(ctx, order, storage if beside else None, dry_run=dry_run)
    return _show(session, planned, ready, snapshot_id=manifest.id)


def _prepare(
    ctx: Context, order: PrepareOrder, storage: Backend | None, *, dry_run: bool
) -> tuple[PreparePlan, PreparedBackup | None]:
    from snapmgr.physical.prepare.run import plan, prepare_folder

    if dry_run:
        return plan(order, storage), None
    ready = prepare_folder(order, storage, tell=ctx.tell, progress=ctx.progress)
    return ready.plan, ready


def _show(session: Session, planned: PreparePlan, ready: PreparedBackup | None, **what: Any) -> int:  # noqa: ANN401 - JSON
    if session.json:
        prepared = ready_document(ready) if ready is not None else None
        session.document(EXIT_OK, dry_run=ready is None, **what, plan=plan_document(planned), prepared=prepared)
    elif ready is None:
        print_lines(show_plan(planned))
    else:
        session.console.tell(
            f"prepared by {planned.backup.info.tool} in {format_duration(ready.duration_s)}: "
            + ", ".join(f"{what} {format_duration(seconds)}" for what, seconds in ready.steps)
        )
        print_lines([ready.path])
    return EXIT_OK


def show_plan(planned: PreparePlan) -> list[str]:
    """Return the plan for people: the way, the reason, the needed space."""
    choice, places, facts = planned.choice, planned.places, planned.facts
    where = places.storage_target if choice.result == "storage" else places.scratch_target
    lines = [
        f"would prepare {planned.order.source} ({planned.backup.info.tool}) to {where}",
        choice.why,
        f"the tool's memory: {format_size(planned.settings.use_memory_bytes)}",
    ]
    for name, needed, free in (
        ("scratch space", choice.scratch_needed_bytes, facts.scratch_free_bytes),
        ("space in the storage", choice.storage_needed_bytes, facts.storage_free_bytes),
    ):
        if needed:
            lines.append(f"{name}: {format_size(needed)} needed, {format_size(free)} free")
    return lines


def plan_document(planned: PreparePlan) -> dict[str, Any]:
    """Return the plan as JSON: the way, the reason, the needed space."""
    from snapmgr.cli.documents import fields

    choice, facts = planned.choice, planned.facts
    return {
        **fields(choice, "way", "result", "why"),
        **fields(facts, "data_bytes", "redo_bytes"),
        "use_memory_bytes": planned.settings.use_memory_bytes,
        "scratch_needed_bytes": choice.scratch_needed_bytes,
        "scratch_free_bytes": facts.scratch_free_bytes,
        "storage_needed_bytes": choice.storage_needed_bytes,
        "storage_free_bytes": facts.storage_free_bytes,
    }


def ready_document(ready: PreparedBackup) -> dict[str, Any]:
    """Return the result as JSON."""
    from snapmgr.cli.documents import fields

    return {
        **fields(ready, "path", "way", "result"),
        **fields(ready.plan.backup.info, "tool", "tool_version", "server_version"),
        "steps": [{"what": what, "seconds": seconds} for what, seconds in ready.steps],
        "written_back_bytes": ready.written.changed_bytes if ready.written is not None else None,
        "duration_s": ready.duration_s,
    }
