"""Measures one rung: a fresh clone, a private mount with a cold cache, the tool, the uploads.

Used by `snapmgr prepare --tune` and by the benchmark's scenario `prepare`.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.contract.errors import MissingRequirementError, NotFoundError, SnapmgrError, VerificationError
from snapmgr.contract.units import format_duration
from snapmgr.physical.prepare.inplace import ApplySettings, ApplyTimes, apply_in_place
from snapmgr.physical.prepare.ownership import take_owners
from snapmgr.physical.prepare.scratchcopy import copy_to_scratch
from snapmgr.physical.prepare.workfolder import work_folder
from snapmgr.physical.tools.request import ApplyRequest
from snapmgr.physical.tuning.checksums import table_checksums
from snapmgr.physical.tuning.rungs import Run, RungSettings
from snapmgr.physical.tuning.tune import Checked, Measured, Sample, ScratchRun
from snapmgr.trace.counters import growth
from snapmgr.trace.verdict import facts_from_counters, judge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapmgr.contract.abilities import ClientMount, FolderCloning, Remounting
    from snapmgr.contract.records import ClientOptions
    from snapmgr.physical.tools.request import BackupInfo, Tool

_SAMPLE_S = 0.5
# Most samples of one rung; a longer rung is sampled less often.
_MOST_SAMPLES = 600
_START_S = 1800.0
_CACHE_PREFIX = "snapmgr-tune-cache-"
_CACHE = re.compile(rf"{_CACHE_PREFIX}(?P<pid>[0-9]+)-.*")
# Tolerance for noticing the end of a tool at its limit.
_LIMIT_SLACK_S = 0.05


class StorageBench(Struct, kw_only=True):
    """`snapmgr.physical.tuning.tune.Bench` on a storage."""

    source: str
    """The finished backup; it is never written to."""
    beside: str
    """Folder of the storage in which clones are made."""
    info: BackupInfo
    tool: Tool
    cloning: FolderCloning
    remounting: Remounting | None
    """None: the storage does not offer private mounts; every rung uses the existing mount."""
    data_bytes: int
    scratch_dir: str
    cache_root: str
    """Where caches lie unless a rung says otherwise."""
    log: str
    """File for the tool's log; each rung replaces it."""
    scratch_memory_bytes: int = 0
    """The tool's buffer pool over scratch; 0: the tool's own default."""
    tell: Callable[[str], None] = lambda _line: None

    def measure(self, settings: RungSettings, limit_s: float, *, warm: bool = False, check: bool = False) -> Measured:
        """See `snapmgr.physical.tuning.tune.Bench`."""
        with ExitStack() as stack:
            cache: str | None = None
            if self.remounting is not None and (warm or settings.cache_dir is not None):
                cache = stack.enter_context(_temporary(settings.cache_dir or self.cache_root))
            client = settings.client_options(cache) if self.remounting is not None else None
            if warm:
                # It fills the cache: clones share their blocks.
                self._once(settings, client, limit_s, check=False)
            return self._once(settings, client, limit_s, check=check, warm=warm)

    def scratch(self, limit_s: float) -> ScratchRun | None:
        """See `snapmgr.physical.tuning.tune.Bench`."""
        room = shutil.disk_usage(self.scratch_dir).free
        if room < self.data_bytes * 1.2:
            return None
        with ExitStack() as stack:
            folder = stack.enter_context(_temporary(self.scratch_dir))
            source = self.source
            if self.remounting is not None:
                mount = stack.enter_context(self.remounting.client_mount(self.source, RungSettings().client_options()))
                source = mount.path
            began = time.monotonic()
            copy = os.path.join(folder, "data")
            copy_s = 0.0
            try:
                copy_to_scratch(source, copy, progress=_until(began + limit_s))
                copy_s = time.monotonic() - began
                self.tool.apply(
                    ApplyRequest(
                        folder=copy,
                        log=self.log,
                        use_memory_bytes=self.scratch_memory_bytes,
                        time_limit_s=max(limit_s - copy_s, 1.0),
                    )
                )
                take_owners(self.source, copy, sync=True)
            except _TooLateError:
                return ScratchRun(
                    copy_s=limit_s, tool_s=0.0, failure=f"it takes longer than {format_duration(limit_s)}"
                )
            except SnapmgrError as error:
                return ScratchRun(copy_s=copy_s, tool_s=0.0, failure=error.message)
            return ScratchRun(copy_s=copy_s, tool_s=time.monotonic() - began - copy_s)

    def _once(
        self, settings: RungSettings, client: ClientOptions | None, limit_s: float, *, check: bool, warm: bool = False
    ) -> Measured:
        watch = _Watch()
        began = time.monotonic()
        with work_folder(self.beside, self.source, f"{self.source} (tuned)", tell=self.tell) as place:
            clone = os.path.join(place.path, "data")
            self.cloning.clone_folder(self.source, clone)
            try:
                ran = apply_in_place(
                    clone,
                    self.tool,
                    ApplySettings(
                        use_memory_bytes=settings.use_memory_bytes or 0,
                        tool_options=settings.tool_options(),
                        client=client,
                        warm_up=settings.warm_up,
                    ),
                    log=self.log,
                    storage=self.remounting,
                    time_limit_s=limit_s,
                    watching=lambda mount: watch.over(mount, os.path.basename(clone)),
                    # As `snapmgr prepare` does: what is only in the client's memory is not in the storage.
                    after=lambda where: take_owners(self.source, where, sync=True),
                )
            except (MissingRequirementError, NotFoundError):
                raise
            except SnapmgrError as error:
                return self._lost(settings, watch, error, limit_s, time.monotonic() - began)
            checked = self._check(clone, place.path) if check else None
        return self._won(settings, watch, ran, checked, warm=warm)

    def _won(
        self, settings: RungSettings, watch: _Watch, ran: ApplyTimes, checked: Checked | None, *, warm: bool
    ) -> Measured:
        # Unmounting is not part of the prepare: everything is already in the storage.
        settle_s = ran.after_s + ran.settle_s
        seconds = ran.warm_up_s + ran.tool_s + settle_s
        counted, verdict = None, None
        if watch.start and watch.end:
            counted = growth(watch.start, watch.end)
            free = shutil.disk_usage(self.scratch_dir).free
            facts = facts_from_counters(
                counted,
                ran.tool_s,
                writeback=settings.writeback,
                folder=self.source,
                data_bytes=self.data_bytes,
                scratch_free_bytes=free,
            )
            verdict = judge(facts)
        return Measured(
            run=Run(settings=settings, seconds=seconds, bottleneck=verdict.bottleneck if verdict else "unknown"),
            temperature="warm" if warm else "cold",
            warm_up_s=ran.warm_up_s,
            tool_s=ran.tool_s,
            settle_s=settle_s,
            verdict=verdict.why if verdict else "",
            advice=verdict.advice if verdict else "",
            counted=counted,
            samples=tuple(watch.samples),
            checked=checked,
        )

    def _lost(
        self, settings: RungSettings, watch: _Watch, error: SnapmgrError, limit_s: float, spent_s: float
    ) -> Measured:
        late = spent_s >= limit_s - _LIMIT_SLACK_S
        return Measured(
            run=Run(settings=settings, seconds=limit_s, cut=True),
            samples=tuple(watch.samples),
            tool_s=spent_s,
            failure=None if late else error.message,
        )

    def _check(self, clone: str, hidden: str) -> Checked:
        began = time.monotonic()
        tables: dict[str, str] | None = None
        why_not = ""
        self.tell("a server on the result reads all tables, for their checksums")
        try:
            # The server's user must be able to pass through.
            os.chmod(hidden, 0o711)  # noqa: S103 - its name is a secret of 16 digits, and its entries keep their modes
            tables = table_checksums(
                clone,
                flavor=self.info.flavor,
                version=self.info.server_version,
                scratch_dir=self.scratch_dir,
                time_limit_s=_START_S,
            )
        except MissingRequirementError as error:
            why_not = error.message
        except VerificationError as error:
            raise VerificationError(
                f"no server starts on the prepared data: {error.message}", hint=error.hint
            ) from error
        return Checked(tables=tables, why_not=why_not, seconds=time.monotonic() - began)


class _Watch:
    """The counters of a private mount while a rung runs."""

    def __init__(self) -> None:
        self.start: dict[str, float] = {}
        self.end: dict[str, float] = {}
        self.samples: list[Sample] = []

    @contextmanager
    def over(self, mount: ClientMount, name: str) -> Iterator[None]:
        self.start = mount.counters()
        done = threading.Event()
        thread = threading.Thread(target=self._sample, args=(mount, done), daemon=True)
        thread.start()
        try:
            yield
        except BaseException:
            # The clone is no longer needed: deleted data need not be uploaded before the unmount.
            shutil.rmtree(os.path.join(mount.path, name), ignore_errors=True)
            raise
        finally:
            done.set()
            thread.join()
        self.end = mount.counters()

    def _sample(self, mount: ClientMount, done: threading.Event) -> None:
        began, pause_s = time.monotonic(), _SAMPLE_S
        while not done.wait(pause_s):
            with suppress(SnapmgrError, OSError):
                self.samples.append(sample(self.start, mount.counters(), time.monotonic() - began))
            if len(self.samples) >= _MOST_SAMPLES:
                del self.samples[::2]
                pause_s *= 2


def sample(start: dict[str, float], now: dict[str, float], at_s: float) -> Sample:
    """Given the counters at the beginning and `at_s` later, return the growth between them."""
    counted = growth(start, now)
    return Sample(
        at_s=at_s,
        read_s=counted.operation_s.get("read", 0.0),
        write_s=counted.operation_s.get("write", 0.0),
        fsync_s=counted.operation_s.get("fsync", 0.0),
        get_bytes=counted.get_bytes,
        put_bytes=counted.put_bytes,
        staged_bytes=counted.staged_bytes,
        cpu_s=counted.cpu_s,
    )


def sweep_caches(root: str) -> None:
    """Remove the cache folders of killed tunings: their clones are gone."""
    for name in os.listdir(root):
        match = _CACHE.fullmatch(name)
        path = os.path.join(root, name)
        if match and not Path("/proc", match["pid"]).exists() and os.lstat(path).st_uid == os.geteuid():
            shutil.rmtree(path, ignore_errors=True)


class _TooLateError(Exception):
    """The time is up."""


def _until(deadline: float) -> Callable[[int, int], None]:
    def tick(_done: int, _total: int) -> None:
        if time.monotonic() > deadline:
            raise _TooLateError

    return tick


@contextmanager
def _temporary(root: str) -> Iterator[str]:
    sweep_caches(root)
    folder = tempfile.mkdtemp(prefix=f"{_CACHE_PREFIX}{os.getpid()}-", dir=root)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
