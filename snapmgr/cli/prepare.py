"""``snapmgr prepare``."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from snapmgr.cli.choice import choose
from snapmgr.cli.output import print_lines
from snapmgr.cli.params import DurationText, SizeText, SnapshotOrFolder, dry_run_option, json_option, unverified_option
from snapmgr.cli.toolbackup import RESULTS, STRATEGIES, PrepareOptions, is_path, prepare_path, prepare_snapshot_backup
from snapmgr.cli.tune import TunableCommand, tune_prepare
from snapmgr.contract.errors import EXIT_OK, ConfigError
from snapmgr.contract.units import format_duration, format_size

if TYPE_CHECKING:
    from snapmgr.catalog.store import Entry
    from snapmgr.cli.session import Session
    from snapmgr.context import Context
    from snapmgr.verify.prepare import Prepared


@click.command(
    cls=TunableCommand,
    epilog="""\b
Examples:
  snapmgr prepare latest                          # in the scratch directory
  snapmgr prepare nightly@latest /mnt/ready --use-memory 4G
  cp -a "$(snapmgr --quiet prepare latest)/." /srv/new
  snapmgr prepare /backup/full --dry-run          # a tool's backup: the plan
  snapmgr prepare /backup/full /srv/ready         # … prepared to a folder
  snapmgr prepare /jfs/full --result storage      # … beside the backup
  snapmgr prepare /jfs/full --mount-option writeback --mount-option cache-size=4G
  snapmgr prepare /jfs/full --tune=10m            # … which settings are best?
""",
)
@click.argument("snapshot", metavar="ID|PATH", type=SnapshotOrFolder())
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--use-memory",
    "use_memory_bytes",
    metavar="SIZE",
    type=SizeText(),
    help='Buffer pool ("4G").  [default: verify.memory of the job, or by free memory]',
)
@click.option(
    "--strategy",
    type=click.Choice(STRATEGIES),
    help="PATH: prepare on a clone in the storage, on a copy on local scratch, or on an overlay.  [default: auto]",
)
@click.option(
    "--result", type=click.Choice(RESULTS), help="PATH: place of the result.  [default: as the strategy leaves it]"
)
@click.option("--tool-option", "tool_options", metavar="OPT", multiple=True, help="PATH: further option for the tool.")
@click.option(
    "--mount-option",
    "mount_options",
    metavar="OPT",
    multiple=True,
    help="PATH: prepare in the storage through a private mount with writeback, upload-delay=TIME, cache-size=SIZE, "
    "cache-dir=DIR, warm-up, or any option of its client.",
)
@click.option(
    "--scratch",
    metavar="DIR",
    type=click.Path(path_type=Path),
    help="PATH: folder on a local disk.  [default: scratch_dir]",
)
@click.option(
    "--tune",
    "tune_s",
    metavar="[=TIME]",
    type=DurationText(),
    help="Do not prepare: measure for at most TIME (30m) which settings are fastest on clones in the storage. For a "
    "PATH, or the ID of a physical job's snapshot.",
)
@click.option(
    "--report",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="With --tune: the HTML report.  [default: snapmgr-tune-NAME-TIME.html here]",
)
@unverified_option
@dry_run_option
@json_option
@click.pass_obj
def command(
    session: Session,
    /,
    snapshot: str,
    folder: Path | None,
    *,
    tune_s: float | None,
    report: Path | None,
    unverified: bool,
    dry_run: bool,
    **given: Any,  # noqa: ANN401 - the fields of PrepareOptions
) -> int:
    """Mount a recovered, cleanly shut-down copy of a datadir, and print its path.

    ID: a throwaway server recovers a writable clone and shuts it down; a second start must find nothing to recover.
    The snapshot does not change. The clone stays until "snapmgr umount". Start a server on it with the printed
    options: a my.cnf may name the live server's folders.

    PATH (with a slash): a finished backup folder of mariadb-backup or xtrabackup, or the ID of a physical backup that
    is still raw. Its tool prepares a copy, at DIR or in a fresh folder; the backup never changes. --strategy auto
    clones it in local storage; in storage behind a client (JuiceFS) it copies the data to scratch if they fit, else
    it takes an overlay if the changes fit there, else a clone. A failed prepare leaves only the tool's log in the
    scratch directory. A killed one leaves a folder ".snapmgr-prepare-…", which the next prepare of the same backup
    removes. The way with xtrabackup was never run with the real program: verify the result.
    """
    options = PrepareOptions(**given)
    if report is not None and tune_s is None:
        raise click.UsageError("--report goes with --tune.")
    if tune_s is not None:
        if folder is not None:
            raise click.UsageError("--tune keeps no result: it takes no DIR.")
        return tune_prepare(session, snapshot, options, time_s=tune_s, report=report, dry_run=dry_run)
    if is_path(snapshot):
        return prepare_path(session, snapshot, folder, options, dry_run=dry_run)
    ctx = session.context()
    entry = choose(session, ctx, snapshot, unverified=unverified, dry_run=dry_run)
    if entry.manifest.physical is not None and entry.manifest.physical.state != "prepared":
        return prepare_snapshot_backup(session, ctx, entry, folder, options, dry_run=dry_run)
    if foreign := options.given():
        raise click.UsageError(
            f"{foreign[0]} is for tool backups that are not prepared yet: a raw physical snapshot, or a folder named "
            "by a path with a slash."
        )
    return _recover_snapshot(session, ctx, entry, folder, pool_bytes=options.use_memory_bytes, dry_run=dry_run)


def _recover_snapshot(
    session: Session, ctx: Context, entry: Entry, folder: Path | None, *, pool_bytes: int | None, dry_run: bool
) -> int:
    from snapmgr.config.model import Verify
    from snapmgr.verify.prepare import prepare

    manifest = entry.manifest
    point = Path(os.path.abspath(folder)) if folder is not None else None
    if dry_run:
        manifest.require_ready("prepared")
        if manifest.source == "directory":
            raise ConfigError(f"{manifest.id} is of a directory: only a database's files have to be recovered")
        where = f"at {point}" if point else f"in a new folder of {ctx.config.scratch_dir}"
        pool = f" (buffer pool {format_size(pool_bytes)})" if pool_bytes else ""
        lines = [f"would recover a writable clone of {manifest.id} {where}{pool}"]
        return session.report(lines, dry_run=True, snapshot_id=manifest.id, mount=None, prepared=None)
    job = session.config().jobs.get(manifest.job)
    if job is None:
        session.console.warn(f"job {manifest.job} is not configured any more: preparing with the defaults")
    prepared = prepare(ctx, entry, job.verify if job is not None else Verify(), pool_bytes=pool_bytes, point=point)
    if session.json:
        _document(session, manifest.id, prepared)
    else:
        what = "recovered" if prepared.recovered else "there was nothing to recover"
        session.console.tell(
            f"{manifest.id}: {what}, cleanly shut down by {prepared.server} in {format_duration(prepared.duration_s)}"
            + (f"; GTID {prepared.gtid}" if prepared.gtid else "")
        )
        if prepared.options:
            session.console.tell(f"server options: {shlex.join(prepared.options)}")
        session.console.tell(f"to end it: snapmgr umount {prepared.lease.point}")
        print_lines([str(prepared.data_path)])
    return EXIT_OK


def _document(session: Session, snapshot_id: str, prepared: Prepared) -> None:
    from snapmgr.cli.documents import fields, mount

    session.document(
        EXIT_OK,
        dry_run=False,
        snapshot_id=snapshot_id,
        mount=mount(prepared.lease),
        prepared=fields(prepared, "server", "recovered", "server_uuid", "gtid", "options", "duration_s"),
    )
