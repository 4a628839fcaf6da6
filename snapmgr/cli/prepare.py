"""``snapmgr prepare``."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from snapmgr.cli.output import print_lines
from snapmgr.cli.params import SizeText, SnapshotName, dry_run_option, json_option
from snapmgr.errors import EXIT_OK, ConfigError
from snapmgr.units import format_duration, format_size

if TYPE_CHECKING:
    from snapmgr.cli.session import Session
    from snapmgr.jobs.prepare import Prepared


@click.command(
    epilog="""\b
Examples:
  snapmgr prepare latest                          # in the scratch directory
  snapmgr prepare nightly@latest /mnt/ready --use-memory 4G
  cp -a "$(snapmgr --quiet prepare latest)/." /srv/new
"""
)
@click.argument("snapshot", metavar="ID", type=SnapshotName())
@click.argument("folder", metavar="[DIR]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--use-memory",
    "pool_bytes",
    metavar="SIZE",
    type=SizeText(),
    help='The server\'s buffer pool ("4G"); else what verify.memory of the job leaves for it.',
)
@dry_run_option
@json_option
@click.pass_obj
def command(session: Session, snapshot: str, folder: Path | None, *, pool_bytes: int | None, dry_run: bool) -> int:
    """Mount a recovered, cleanly shut-down copy of a datadir, and print its path.

    A throwaway server recovers a writable clone and shuts it down; started once more it must find nothing to recover.
    The snapshot does not change. The clone stays until "snapmgr umount". A server on it needs the options that are
    printed: a my.cnf may name the live server's folders.
    """
    from snapmgr.config import Verify
    from snapmgr.jobs.prepare import prepare

    ctx = session.context()
    entry = ctx.catalog.resolve(snapshot)
    manifest = entry.manifest
    point = Path(os.path.abspath(folder)) if folder is not None else None
    if dry_run:
        manifest.require_ready("prepared")
        if manifest.source == "directory":
            raise ConfigError(f"{manifest.id} is of a directory: only a database's files have to be recovered")
        if session.json:
            session.document(EXIT_OK, dry_run=True, snapshot_id=manifest.id, mount=None, prepared=None)
        else:
            where = f"at {point}" if point else f"in a new folder of {ctx.config.scratch_dir}"
            pool = f" (buffer pool {format_size(pool_bytes)})" if pool_bytes else ""
            print_lines([f"would recover a writable clone of {manifest.id} {where}{pool}"])
        return EXIT_OK
    job = session.config().jobs.get(manifest.job)
    if job is None:
        session.voice.warn(f"job {manifest.job} is not configured any more: preparing with the defaults")
    prepared = prepare(ctx, entry, job.verify if job is not None else Verify(), pool_bytes=pool_bytes, point=point)
    if session.json:
        _document(session, manifest.id, prepared)
    else:
        what = "recovered" if prepared.recovered else "there was nothing to recover"
        session.voice.tell(
            f"{manifest.id}: {what}, cleanly shut down by {prepared.server} in {format_duration(prepared.duration_s)}"
            + (f"; GTID {prepared.gtid}" if prepared.gtid else "")
        )
        if prepared.options:
            session.voice.tell(f"server options: {shlex.join(prepared.options)}")
        session.voice.tell(f"to end it: snapmgr umount {prepared.lease.point}")
        print_lines([str(prepared.data_path)])
    return EXIT_OK


def _document(session: Session, snapshot_id: str, prepared: Prepared) -> None:
    from snapmgr.cli.documents import mount

    session.document(
        EXIT_OK,
        dry_run=False,
        snapshot_id=snapshot_id,
        mount=mount(prepared.lease),
        prepared={
            "server": prepared.server,
            "recovered": prepared.recovered,
            "server_uuid": prepared.server_uuid,
            "gtid": prepared.gtid,
            "options": list(prepared.options),
            "duration_s": prepared.duration_s,
        },
    )
