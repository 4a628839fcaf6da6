"""Several jobs on one file system, in one process: what they share, and what they do not."""

from __future__ import annotations

import subprocess
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from snapmgr.backup.run import backup
from snapmgr.capacity import read
from snapmgr.catalog.store import Catalog
from snapmgr.config.load import load_config
from snapmgr.context import Context
from snapmgr.contract.errors import ShortOfSpaceError
from snapmgr.jobrun import run_job
from snapmgr.keep.prune import prune
from snapmgr.system import mountapi, probe
from snapmgr_btrfs import armed, backend, kernel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.scene import Scene

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")

JOBS = ("one", "two", "three")


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    found: Counter[str] = Counter()

    def counted(where: object, name: str) -> None:
        call = getattr(where, name)

        def count(*arguments: object, **options: object) -> object:
            found[name] += 1
            return call(*arguments, **options)

        monkeypatch.setattr(where, name, count)

    counted(backend.BtrfsBackend, "gauges")
    counted(armed, "sync_file_system")
    counted(kernel, "fs_uuid")  # once for each use of a private mount
    counted(mountapi, "new_mount")
    counted(probe, "_start")
    # However slow this machine is now.
    for where, name in ((read, "_RECENT_S"), (backend, "_FLUSHED_S"), (probe, "_ASK_AGAIN_S")):
        monkeypatch.setattr(where, name, 600.0)
    probe._answered.clear()
    return found


@pytest.fixture
def ctx(files: Scene) -> Iterator[Context]:
    text = ""
    for job in JOBS:
        subvolume = Path(files.file_system.point) / job
        subprocess.run(["btrfs", "-q", "subvolume", "create", subvolume], check=True)
        (subvolume / "file").write_text(job)
        text += f'[job.{job}]\nsource = "directory"\npath = "{subvolume}"\nretention.keep-last = 1\n'
    files.configure(text=text)
    config = load_config(files.config_file)
    yield Context(config=config, catalog=Catalog(config.state_dir), tell=files.lines.append)
    for job in JOBS:
        subprocess.run(["btrfs", "-q", "subvolume", "delete", Path(files.file_system.point) / job], check=True)


def test_the_file_system_is_asked_flushed_and_its_space_is_read_once(ctx: Context, counts: Counter[str]) -> None:
    taken = [backup(ctx, ctx.config.job(job)) for job in JOBS]
    assert (counts["gauges"], counts["sync_file_system"]) == (1, 1)
    # The state directory, on another one, was not there yet.
    assert counts["_start"] == 1
    # One for reading, one for writing; the reading of the space has the former in the first run.
    assert counts["new_mount"] == 2 * len(JOBS)
    # Beside the reading: to arm, to settle, to note.
    assert counts["fs_uuid"] == 1 + 3 * len(JOBS) + len(JOBS)  # `locate` asks, too
    # Written after the flush, and in the snapshot all the same.
    for job, manifest in zip(JOBS, taken, strict=True):
        file = Path(manifest.path).parent / ".snapmgr" / manifest.id / "file"
        assert file.read_text() == job
    capacity = read.read_capacity(ctx.catalog, taken[0].members[0].ref.pool)
    assert capacity is not None
    assert {len(series.samples) for series in capacity.series} == {1}


def test_after_a_deletion_and_after_a_while_the_space_is_read_anew(
    ctx: Context, counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = ctx.config.job("one")
    for _ in range(2):
        backup(ctx, job)
    assert counts["gauges"] == 1
    assert len(prune(ctx, job).deleted) == 1
    backup(ctx, job)
    assert counts["gauges"] == 2
    monkeypatch.setattr(read, "_RECENT_S", 0.05)
    time.sleep(0.05)
    backup(ctx, job)
    assert counts["gauges"] > 2


def test_a_job_without_room_prunes_and_reads_again(ctx: Context, counts: Counter[str]) -> None:
    job = ctx.config.job("one")
    for _ in range(2):
        backup(ctx, job)
    outcome = run_job(ctx, replace(job, free_min="99.9%"), with_verify=False, with_prune=True)
    assert isinstance(outcome.error, ShortOfSpaceError)
    # Before the prune, and after it has waited for the space.
    assert counts["gauges"] == 2
