"""Preparing a finished backup of a server's own tool: where and how, then doing it; the backup never changes."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from snapmgr.api import FolderCloning, Remounting
from snapmgr.errors import LackingError, SnapmgrError, StorageError
from snapmgr.records import ClientOptions
from snapmgr.stage.prepare.backupfolder import Backup, inspect
from snapmgr.stage.prepare.forecast import (
    NAMES,
    PAGE_BYTES,
    Choice,
    Facts,
    Result,
    Way,
    choose,
    forecast,
    remedy,
    strategy_of,
    touched_pages,
)
from snapmgr.stage.prepare.inplace import NoMountError, Settings, apply_in_place, choose_memory
from snapmgr.stage.prepare.measure import measure
from snapmgr.stage.prepare.order import Order, Plan, Ready
from snapmgr.stage.prepare.overlay import copied_up, overlay
from snapmgr.stage.prepare.ownership import stamps, take_owners
from snapmgr.stage.prepare.place import free_bytes, memory_available
from snapmgr.stage.prepare.scratchcopy import Tree, copy_to_scratch
from snapmgr.stage.prepare.workplace import Workplace, workplace
from snapmgr.stage.prepare.writeback import Written, outline_of, write_back
from snapmgr.stage.tool import read_state, tool_for
from snapmgr.system.kernel import sync_file_system
from snapmgr.units import format_duration, format_size

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from snapmgr.stage.prepare.place import Place
    from snapmgr.stage.request import Progress
    from snapmgr.stage.tool import Tool

_UPLOAD_DELAY_S = 3600.0


def _silent(_line: str) -> None:
    pass


def _no_bar(_what: str, _done: int, _total: int) -> None:
    pass


def plan(order: Order, storage: object | None) -> Plan:
    """Return what `prepare_folder` would do; touches nothing, so that writing to the storage is guessed, not measured.

    Raises as `prepare_folder` does for what it finds before it begins.
    """
    backup = inspect(order.source, program=order.program)
    return _plan(order, storage, backup, order.place(make=False))


def _plan(
    order: Order,
    storage: object | None,
    backup: Backup,
    place: Place,
    *,
    storage_work: str | None = None,
    scratch_work: str | None = None,
) -> Plan:
    speeds = measure(order.source, backup.sizes, storage_work=storage_work, scratch_work=scratch_work)
    client = order.settings.client
    facts = Facts(
        file_bytes=tuple(backup.sizes.values()),
        redo_bytes=backup.redo_bytes,
        speeds=speeds,
        remote=isinstance(storage, Remounting),
        scratch_free_bytes=free_bytes(place.scratch),
        storage_free_bytes=free_bytes(place.beside),
        can_clone=isinstance(storage, FolderCloning),
        # Who names the strategy and no option of a mount means the mount that is there.
        can_remount=isinstance(storage, Remounting) and not (order.strategy == "storage" and client is None),
        can_overlay=os.geteuid() == 0,
    )
    settings = order.settings
    if not settings.use_memory_bytes:
        settings = replace(settings, use_memory_bytes=choose_memory(backup.redo_bytes, memory_available()))
    return Plan(
        order=order,
        backup=backup,
        place=place,
        facts=facts,
        choice=_choice(order, facts, place.result),
        settings=settings,
    )


def _choice(order: Order, facts: Facts, result: Result | None) -> Choice:
    client = order.settings.client
    # Who says how to mount has chosen.
    way: Way | None = None if client is None else "writeback" if client.writeback else "storage"
    choice = choose(facts, strategy=order.strategy, result=result, way=way)
    if choice is not None:
        return choice
    found = forecast(facts, result)
    wanted = [one for one in found if order.strategy in (None, strategy_of(one.way)) and way in (None, one.way)]
    # Of the two forms on a clone the private mount is named where it was asked for.
    reasons = "; ".join(f"{NAMES[one.way]}: {one.obstacle}" for one in wanted if way or one.way != "writeback")
    raise StorageError(
        f"{order.source} cannot be prepared here: {reasons}",
        hint=remedy(facts, strategy=order.strategy, result=result, way=way),
    )


def prepare_folder(
    order: Order,
    storage: object | None,
    *,
    tell: Callable[[str], None] = _silent,
    progress: Callable[[str, int, int], None] = _no_bar,
) -> Ready:
    """Prepare a copy of a finished backup: what lies at `Ready.path` is a datadir that a server starts on.

    Args:
        order: what is wanted.
        storage: the backend that holds the backup, if there is one: what it can is asked of it.
        tell: takes lines for people.
        progress: a step, how much of it is done, of how much.

    The backup never changes. What fails or is interrupted leaves nothing but the tool's log, which the error names;
    what is killed leaves a hidden folder, which the next prepare of the same backup, or to the same target, removes.

    Raises ConfigError if it is no backup, unfinished, an increment, prepared already, or the target exists; InUseError
    if a server runs on it; BusyError if it is being prepared; LackingError without the tool; StorageError.
    """
    backup, place = inspect(order.source, program=order.program), order.place(make=True)
    with ExitStack() as stack:
        there: Workplace | None = None
        if isinstance(storage, FolderCloning) and place.result != "scratch":
            try:
                there = stack.enter_context(_work_in(place.beside, order, place.storage_target, tell))
            except (LackingError, StorageError) as error:
                if place.result == "storage" or order.strategy in ("storage", "overlay"):
                    raise
                # Mounted read-only, or full: scratch is left.
                tell(f"warning: nothing can be made beside the backup: {error.message}")
                storage = None
        local = stack.enter_context(_work_in(place.scratch, order, place.scratch_target, tell))
        planned = _plan(
            order, storage, backup, place, storage_work=there.path if there else None, scratch_work=local.path
        )
        return _Preparing(planned, storage, there, local, tell=tell, progress=progress).run()


def _work_in(folder: str, order: Order, target: str, tell: Callable[[str], None]) -> AbstractContextManager[Workplace]:
    return workplace(folder, os.path.realpath(order.source), target, tell=tell)


class _Preparing:
    """One prepare, in its workplaces."""

    def __init__(
        self,
        planned: Plan,
        storage: object | None,
        there: Workplace | None,
        local: Workplace,
        *,
        tell: Callable[[str], None],
        progress: Callable[[str, int, int], None],
    ) -> None:
        self._plan = planned
        self._storage = storage
        self._there = there
        self._local = local
        self._tell = tell
        self._progress = progress
        self._source = planned.order.source
        self._tool: Tool = tool_for(planned.backup.staged, program=planned.order.program)
        self._steps: list[tuple[str, float]] = []
        self._written: Written | None = None

    def run(self) -> Ready:
        """Go the way that was chosen; if a private mount is refused, the best one without."""
        choice = self._plan.choice
        self._tell(choice.why)
        try:
            path = self._go(choice.way, choice.result)
        except NoMountError as error:
            if choice.way != "writeback" or self._plan.settings.client is not None:
                raise
            self._tell(f"warning: {error.message}" + (f" ({error.hint})" if error.hint else ""))
            facts = replace(self._plan.facts, can_remount=False)
            choice = _choice(self._plan.order, facts, self._plan.place.result)
            self._tell(choice.why)
            self._steps.clear()
            path = self._go(choice.way, choice.result)
        return Ready(
            path=path,
            way=choice.way,
            result=choice.result,
            why=choice.why,
            plan=self._plan,
            steps=tuple(self._steps),
            written=self._written,
        )

    def _go(self, way: Way, result: Result) -> str:
        place = self._plan.place
        if way in ("storage", "writeback"):
            there = self._need(self._there)
            name = os.path.basename(place.storage_target)
            self._in_storage(os.path.join(there.path, name), way)
            return self._land(there, name)
        local = self._local
        if way == "overlay":
            return self._over()
        name = os.path.basename(place.scratch_target)
        copy = os.path.join(local.path, name)
        before = self._copied(self._source, copy, digests=result == "storage")
        self._apply(copy, self._plan.settings.without_mount())
        if result == "scratch":
            self._owned(copy, sync=False)
            self._flushed(copy)
            return self._land(local, name)
        return self._put_back(copy, before, None)

    @staticmethod
    def _need(work: Workplace | None) -> Workplace:
        if work is None:
            raise StorageError("this storage cannot clone folders")
        return work

    def _land(self, work: Workplace, name: str) -> str:
        """Give the result its place, if the backup is what it was when this began."""
        if stamps(self._source) != self._plan.backup.stamps:
            raise StorageError(
                f"{self._source} changed while it was prepared: the result is thrown away",
                hint="does something write to the backup?",
            )
        return work.land(name)

    def _timed(self, what: str, start: float) -> None:
        self._steps.append((what, time.monotonic() - start))

    def _clone(self, target: str) -> None:
        if not isinstance(self._storage, FolderCloning):
            raise StorageError(f"the storage of {self._source} cannot clone folders")
        start = time.monotonic()
        self._storage.clone_folder(self._source, target)
        self._timed("clone", start)

    def _in_storage(self, clone: str, way: Way) -> None:
        settings = self._plan.settings
        if way == "writeback" and settings.client is None:
            settings = replace(settings, client=self._writeback())
        if settings.client is not None and settings.client.cache_dir is None:
            # What is not uploaded yet needs room that was looked at.
            cache = os.path.join(self._local.path, "cache")
            os.makedirs(cache, mode=0o700, exist_ok=True)
            settings = replace(settings, client=replace(settings.client, cache_dir=cache))
        if not os.path.lexists(clone):  # a private mount may have been refused after it was made
            self._clone(clone)
        self._apply(clone, settings)
        if settings.client is None:
            self._owned(clone, sync=True)

    def _writeback(self) -> ClientOptions:
        pages = touched_pages(self._plan.facts.data_bytes, self._plan.facts.redo_bytes)
        wanted = self._plan.facts.data_bytes + 2 * pages * PAGE_BYTES
        return ClientOptions(
            writeback=True,
            upload_delay_s=_UPLOAD_DELAY_S,
            cache_bytes=max(min(wanted, self._plan.facts.scratch_free_bytes // 2), 256 << 20),
        )

    def _copied(self, source: str, copy: str, *, digests: bool) -> Tree:
        start = time.monotonic()
        before = copy_to_scratch(
            source,
            copy,
            digests=digests,
            progress=self._bar("copying to scratch"),
        )
        self._timed("copy", start)
        return before

    def _apply(self, folder: str, settings: Settings) -> None:
        # Not in the storage: it is slow, and a private mount does not see what another one writes.
        log = os.path.join(self._local.path, "prepare.log")
        self._tell(f"{self._tool.name} applies {format_size(self._plan.facts.redo_bytes)} of redo")
        remounting = self._storage if isinstance(self._storage, Remounting) else None
        try:
            ran = apply_in_place(
                folder,
                self._tool,
                settings,
                log=log,
                storage=remounting,
                time_limit_s=self._plan.order.time_limit_s,
                tell=self._tell,
                progress=self._show,
                after=(lambda where: self._owned(where, sync=True)) if settings.client is not None else lambda _w: None,
            )
        except SnapmgrError as error:
            kept = self._keep_log(log)
            if kept is not None:
                error.message = error.message.replace(log, kept)
                error.args = (error.message,)
                error.hint = error.hint.replace(log, kept) if error.hint else f"the tool's log: {kept}"
            raise
        for what, seconds in (("warm-up", ran.warm_up_s), ("prepare", ran.tool_s), ("upload", ran.settle_s)):
            if seconds:
                self._steps.append((what, seconds))
        state = read_state(folder).state
        if state != "prepared":
            raise StorageError(
                f"{self._tool.name} ended, and calls the backup {state}", hint="is there an option that stops it early?"
            )

    def _keep_log(self, log: str) -> str | None:
        """Move the log of a tool that failed to the scratch folder; return where it is."""
        kept = os.path.join(self._plan.place.scratch, f"snapmgr-prepare-{os.getpid()}.log")
        with suppress(OSError):
            with open(log, "rb") as file:
                data = file.read()
            fd = os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            return kept
        return None

    def _bar(self, what: str) -> Callable[[int, int], None]:
        def show(done_bytes: int, total_bytes: int) -> None:
            # In MiB, as a line of the bar has no units; rounded up, so that only all is all.
            total = -(-total_bytes >> 20)
            self._progress(f"{what} (MiB)", total if done_bytes >= total_bytes else done_bytes >> 20, total)

        return show

    def _show(self, now: Progress) -> None:
        if now.expected_bytes:
            self._bar(now.phase)(min(now.done_bytes, now.expected_bytes), now.expected_bytes)

    def _owned(self, folder: str, *, sync: bool) -> None:
        start = time.monotonic()
        take_owners(self._source, folder, sync=sync)
        self._timed("owners and flush" if sync else "owners", start)

    def _flushed(self, folder: str) -> None:
        start = time.monotonic()
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync_file_system(fd)
        except OSError as error:
            raise StorageError(f"cannot flush the file system of {folder}: {error.strerror}") from error
        finally:
            os.close(fd)
        self._timed("flush", start)

    def _over(self) -> str:
        work = os.path.join(self._local.path, "overlay")
        os.mkdir(work, 0o700)
        before = outline_of(self._source)
        with overlay(self._source, work) as (merged, upper):
            self._apply(merged, self._plan.settings.without_mount())
            changed = copied_up(upper)
            self._tell(f"{len(changed)} of {len(before.sizes)} files were changed")
            return self._put_back(merged, before, changed)

    def _put_back(self, prepared: str, before: Tree, only: set[str] | None) -> str:
        there = self._need(self._there)
        name = os.path.basename(self._plan.place.storage_target)
        clone = os.path.join(there.path, name)
        self._clone(clone)
        start = time.monotonic()
        self._written = write_back(
            prepared,
            clone,
            before,
            only=only,
            progress=self._bar("comparing and writing back"),
        )
        self._timed("write back", start)
        self._tell(
            f"{format_size(self._written.changed_bytes)} in {self._written.changed_files} files written back in "
            f"{format_duration(self._steps[-1][1])}"
        )
        self._owned(clone, sync=True)
        return self._land(there, name)
