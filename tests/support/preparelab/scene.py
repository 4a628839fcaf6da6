"""A backup on a JuiceFS volume in the slow store, prepared in one way after the other, each with a cold cache."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapmgr.system.command import find_program
from support.juicefs import juicefs_volume
from support.objectstore import ACCESS_KEY, SECRET_KEY, Pace, object_store
from support.preparelab.cells import client_options, tool_options
from support.preparelab.samples import Sample
from support.processes import wait_until
from support.redobackup import redo_backup, table_checksums
from support.storage import loop_filesystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from support.juicefs import JuicefsVolume
    from support.objectstore import ObjectStore
    from support.preparelab.cells import Cell, Way
    from support.redobackup import RedoBackup

_UPLOAD_LIMIT_S = 1800.0
_END_LIMIT_S = 120.0
_DISK_BYTES, _DISK_SHARE = 8 << 30, 16
"""Size of the local disk, sparse: this much, and so many times the data."""
_TUNE_SLACK_S = 900.0
"""The last rung, and the comparison of the tables, come on top."""


class FailedError(Exception):
    """A prepare that failed, or gave other tables; the message says what it said."""


class PrepareLab:
    """A volume that holds one backup. Made by `prepare_lab`."""

    def __init__(
        self,
        store: ObjectStore,
        volume: JuicefsVolume,
        backup: RedoBackup,
        folder: Path,
        *,
        reports: Path,
        tune_s: float,
    ) -> None:
        self.store = store
        self.volume = volume
        self.backup = backup
        self._folder = folder
        self._reports = reports
        self._tune_s = tune_s
        self._scratch = folder / "scratch"
        self._config = folder / "snapmgr.toml"
        self._tuned: dict[str, dict[str, Any]] = {}

    def configure(self) -> None:
        """Write the configuration of `snapmgr prepare`."""
        for name in ("scratch", "caches"):
            (self._folder / name).mkdir(mode=0o711)
        self._config.write_text(
            f'state_dir = "{self._folder}/state"\nscratch_dir = "{self._scratch}"\n\n'
            f'[backend.juicefs]\nmeta_url = "{self.volume.meta_url}"\ncache_root = "{self._folder}/caches"\n'
        )

    def sample(self, cell: Cell, way: Way, *, sizes_mib: tuple[int, int], limit_s: float, check: bool) -> Sample:
        """Prepare the backup once; what fails is a sample without a time."""
        facts: dict[str, Any] = {}
        seconds, failure = None, ""
        try:
            if way.search and cell.id not in self._tuned:
                with self._mounted(way):
                    self._tuned[cell.id] = self._tune(cell)
            with self._mounted(way):
                result, seconds = self._run(cell, way, facts, limit_s)
                if check:
                    self._check(result)
        except FailedError as error:
            seconds, failure = None, str(error)
        if way.search:
            facts["tuning"] = self._tuned.get(cell.id)
        # What was deleted is not always gone when the client ends.
        self.volume.juicefs("gc", "--delete", self.volume.meta_url, timeout_s=_UPLOAD_LIMIT_S)
        return Sample(
            cell=cell.id,
            way=way.name,
            data_mib=sizes_mib[0],
            redo_mib=sizes_mib[1],
            seconds=None if seconds is None else round(seconds, 2),
            failure=failure,
            checked=check and seconds is not None,
            facts=facts | {"data_bytes": self.backup.data_bytes, "redo_bytes": self.backup.redo_bytes},
        )

    @contextmanager
    def _mounted(self, way: Way) -> Iterator[None]:
        """Mount the volume with an empty cache; what came to be while the context lasted is removed, at full speed."""
        self.store.pace(Pace())
        cache = self._folder / "cache"
        try:
            with self.volume.mounted(*client_options(way, self.backup.data_bytes), cache=cache):
                try:
                    yield
                finally:
                    self.store.pace(Pace())
                    self._remove_results()
        finally:
            shutil.rmtree(cache, ignore_errors=True)

    def _run(self, cell: Cell, way: Way, facts: dict[str, Any], limit_s: float) -> tuple[Path, float]:
        self.store.pace(cell.pace)
        before = self.store.statistics()
        started = time.monotonic()
        if way.by_hand:
            result = self._by_hand(way, facts, limit_s)
        else:
            options = self._tuned[cell.id]["arguments"] if way.search else way.options
            result = self._by_snapmgr(options, facts, limit_s)
        seconds = time.monotonic() - started
        facts["store"] = self.store.statistics().since(before)
        return result, seconds

    def _by_hand(self, way: Way, facts: dict[str, Any], limit_s: float) -> Path:
        result = self.volume.point / "by-hand"
        self.volume.juicefs("clone", f"{self.volume.point}/backup", str(result))
        log = self._folder / "prepare.log"
        options = tool_options(way, self.backup.data_bytes, self.backup.redo_bytes)
        command = [find_program("mariadb-backup"), "--no-defaults", "--prepare", f"--target-dir={result}", *options]
        started = time.monotonic()
        code, _ = _to_the_end(command, log, limit_s)
        facts["tool_s"] = round(time.monotonic() - started, 2)
        text = log.read_text(errors="replace").rstrip()
        if code or not text.endswith("completed OK!"):
            raise FailedError(f"mariadb-backup ended with {code}: {text[-500:]}")
        wait_until(lambda: self.volume.counter("juicefs_staging_blocks") == 0, _UPLOAD_LIMIT_S)
        return result

    def _by_snapmgr(self, options: Sequence[str], facts: dict[str, Any], limit_s: float) -> Path:
        document = self._snapmgr(options, limit_s)
        plan, prepared = document["plan"], document["prepared"]
        facts |= {name: plan[name] for name in ("way", "result", "why")}
        facts["steps"] = prepared["steps"]
        return Path(prepared["path"])

    def _tune(self, cell: Cell) -> dict[str, Any]:
        """Let snapmgr look for the best settings; return what it found."""
        self.store.pace(cell.pace)
        self._reports.mkdir(parents=True, exist_ok=True)
        report = self._reports / f"tune-{cell.id.replace('/', '-')}-{time.time_ns()}.html"
        options = [f"--tune={self._tune_s:.0f}s", f"--report={report}"]
        found: dict[str, Any] = self._snapmgr(options, self._tune_s + _TUNE_SLACK_S)["tuning"]
        if found["arguments"] is None:
            raise FailedError("nothing was measured")
        for run in found["runs"]:
            # Long, and in the report.
            run.pop("samples"), run.pop("counters")
        return found | {"report": str(report)}

    def _snapmgr(self, options: Sequence[str], limit_s: float) -> dict[str, Any]:
        log = self._folder / "snapmgr.log"
        backup = f"{self.volume.point}/backup"
        command = [sys.executable, "-m", "snapmgr", "--config", str(self._config), "prepare", backup, *options]
        code, out = _to_the_end([*command, "--json"], log, limit_s)
        if code:
            said = f"{log.read_text(errors='replace')[-500:]} {out[-500:]}"
            raise FailedError(f"snapmgr prepare ended with {code}: {said}")
        document: dict[str, Any] = json.loads(out)
        return document

    def _check(self, result: Path) -> None:
        """Compare the tables with those of a plain prepare. Raises FailedError."""
        self.store.pace(Pace())
        with work_folder(self._folder.parent) as folder:
            copy = folder / "copy"
            shutil.copytree(result, copy)
            found = table_checksums(copy)
        if found != self.backup.checksums:
            wrong = sorted(name for name, value in self.backup.checksums.items() if found.get(name) != value)
            raise FailedError(f"tables differ from those of a plain prepare: {', '.join(wrong)}")

    def _remove_results(self) -> None:
        for folder in (self.volume.point, self._scratch):
            for path in folder.iterdir():
                # The mount's own files, ".stats" and others, are no folders.
                if path.is_dir() and path.name not in {"backup", ".trash"}:
                    shutil.rmtree(path)


def _to_the_end(command: Sequence[str], log: Path, limit_s: float) -> tuple[int, str]:
    """Run a program, its messages in `log`; return how it ended and what it printed. Interrupted, it may clean up."""
    with log.open("wb") as messages:
        environment = os.environ | {"PYTHONPATH": ":".join(path for path in sys.path if path), "LC_ALL": "C.UTF-8"}
        process = subprocess.Popen(
            [find_program("setpriv"), "--pdeathsig", "INT", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=messages,
            env=environment,
            start_new_session=True,
            text=True,
        )
        try:
            out, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _end(process)
            raise FailedError(f"it took longer than {limit_s:.0f} s") from None
        except BaseException:
            _end(process)
            raise
    return process.returncode, out


def _end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=_END_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


@contextmanager
def prepare_lab(
    data_bytes: int, redo_bytes: int, *, base: Path, reports: Path, tune_s: float, cache: Path | None = None
) -> Iterator[PrepareLab]:
    """Make a volume in a slow store, with its metadata in Redis and a backup of about these sizes in it.

    All that is large, objects, caches and scratch, lies on an XFS of its own on a sparse file in `base`. What
    ``--tune`` reports, which may take `tune_s` for each cell, is kept in `reports`.
    """
    backup = redo_backup(data_bytes, redo_bytes, cache=cache)
    with ExitStack() as stack:
        # The machine's own file system may be slow to make files, of which there are many: blocks, and staged ones.
        size = _DISK_BYTES + _DISK_SHARE * backup.data_bytes
        disk = stack.enter_context(loop_filesystem("xfs", size, mount_options=("discard",), base=base)).point
        folder = stack.enter_context(work_folder(disk))
        store = stack.enter_context(object_store(folder / "objects"))
        volume = stack.enter_context(
            juicefs_volume(
                "redis",
                storage="s3",
                bucket=store.bucket(),
                access_key=ACCESS_KEY,
                secret_key=SECRET_KEY,
                mount=False,
                base=disk,
            )
        )
        with volume.mounted(cache=folder / "cache"):
            shutil.copytree(backup.folder, volume.point / "backup")
        shutil.rmtree(folder / "cache")
        lab = PrepareLab(store, volume, backup, folder, reports=reports, tune_s=tune_s)
        lab.configure()
        yield lab
