"""Prepares a copy of a finished tool backup in the chosen way; the backup itself never changes."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING

from msgspec.structs import replace

from snapmgr.contract.abilities import FolderCloning, Remounting
from snapmgr.contract.errors import MissingRequirementError, SnapmgrError, StorageError
from snapmgr.contract.records import ClientOptions
from snapmgr.contract.units import format_duration, format_size
from snapmgr.physical.prepare.backupfolder import BackupFolder, inspect
from snapmgr.physical.prepare.choice import Choice, Facts, ResultPlace, Way, choose
from snapmgr.physical.prepare.inplace import ApplySettings, NoMountError, apply_in_place, choose_memory
from snapmgr.physical.prepare.order import PreparedBackup, PrepareOrder, PreparePlan
from snapmgr.physical.prepare.overlay import copied_up, overlay
from snapmgr.physical.prepare.ownership import stamps, take_owners
from snapmgr.physical.prepare.places import free_bytes, memory_available
from snapmgr.physical.prepare.scratchcopy import Tree, copy_to_scratch
from snapmgr.physical.prepare.workfolder import WorkFolder, work_folder
from snapmgr.physical.prepare.writeback import Written, outline_of, write_back
from snapmgr.physical.tools.choose import tool_for
from snapmgr.physical.tools.infofile import read_info
from snapmgr.system.kernel import sync_file_system

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapmgr.physical.prepare.places import PreparePlaces
    from snapmgr.physical.tools.request import Progress, Tool

_UPLOAD_DELAY_S = 3600.0


def plan(order: PrepareOrder, storage: object | None) -> PreparePlan:
    """Return what `prepare_folder` would do; changes nothing. Raises what `prepare_folder` raises before it begins."""
    backup = inspect(order.source, program=order.program)
    return _plan(order, storage, backup, order.places(make=False))


def _plan(order: PrepareOrder, storage: object | None, backup: BackupFolder, places: PreparePlaces) -> PreparePlan:
    client = order.settings.client
    facts = Facts(
        file_bytes=tuple(backup.sizes.values()),
        redo_bytes=backup.redo_bytes,
        remote=isinstance(storage, Remounting),
        scratch_free_bytes=free_bytes(places.scratch),
        storage_free_bytes=free_bytes(places.beside),
        can_clone=isinstance(storage, FolderCloning),
        # --strategy storage without a mount option means the existing mount.
        can_remount=isinstance(storage, Remounting) and not (order.strategy == "storage" and client is None),
        can_overlay=os.geteuid() == 0,
    )
    settings = order.settings
    if not settings.use_memory_bytes:
        settings = replace(settings, use_memory_bytes=choose_memory(backup.redo_bytes, memory_available()))
    return PreparePlan(
        order=order,
        backup=backup,
        places=places,
        facts=facts,
        choice=_choice(order, facts, places.result),
        settings=settings,
    )


def _choice(order: PrepareOrder, facts: Facts, result: ResultPlace | None) -> Choice:
    client = order.settings.client
    # A mount option decides the way.
    way: Way | None = None if client is None else "writeback" if client.writeback else "storage"
    return choose(facts, source=order.source, strategy=order.strategy, result=result, way=way)


def prepare_folder(
    order: PrepareOrder,
    storage: object | None,
    *,
    tell: Callable[[str], None] = lambda _line: None,
    progress: Callable[[str, int, int], None] = lambda _what, _done, _total: None,
) -> PreparedBackup:
    """Prepare a copy of a finished backup: a server can start on the datadir at `PreparedBackup.path`.

    Args:
        order: source, target and options.
        storage: the backend that holds the backup; its abilities limit the ways.
        tell: receives messages for the user.
        progress: receives a step, its finished part and its total.

    A failed or interrupted prepare leaves only the tool's log, which the error names. A killed one leaves a hidden
    folder, which the next prepare of the same backup or to the same target removes.

    Raises ConfigError if the source is not a backup, unfinished, an increment or prepared already, or if the target
    exists; InUseError if a server runs on the source; BusyError if another prepare of it is running;
    MissingRequirementError without the tool; StorageError.
    """
    backup, places = inspect(order.source, program=order.program), order.places(make=True)
    source = os.path.realpath(order.source)
    with ExitStack() as stack:
        there: WorkFolder | None = None
        if isinstance(storage, FolderCloning) and places.result != "scratch":
            try:
                there = stack.enter_context(work_folder(places.beside, source, places.storage_target, tell=tell))
            except (MissingRequirementError, StorageError) as error:
                if places.result == "storage" or order.strategy in ("storage", "overlay"):
                    raise
                # The storage is mounted read-only or full: only scratch remains.
                tell(f"warning: cannot write beside the backup: {error.message}")
                storage = None
        if there is not None and places.scratch == places.beside:
            local = there
        else:
            local = stack.enter_context(work_folder(places.scratch, source, places.scratch_target, tell=tell))
        planned = _plan(order, storage, backup, places)
        return _Prepare(planned, storage, there, local, tell=tell, progress=progress).run()


class _Prepare:
    """One prepare, in its work folders."""

    def __init__(
        self,
        planned: PreparePlan,
        storage: object | None,
        there: WorkFolder | None,
        local: WorkFolder,
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
        self._tool: Tool = tool_for(planned.backup.info, program=planned.order.program)
        self._steps: list[tuple[str, float]] = []
        self._written: Written | None = None

    def run(self) -> PreparedBackup:
        """Take the chosen way; if the private mount fails, take the next way without it."""
        choice = self._plan.choice
        self._tell(choice.why)
        try:
            path = self._go(choice.way, choice.result)
        except NoMountError as error:
            if choice.way != "writeback" or self._plan.settings.client is not None:
                raise
            self._tell(f"warning: {error.message}" + (f" ({error.hint})" if error.hint else ""))
            facts = replace(self._plan.facts, can_remount=False)
            choice = _choice(self._plan.order, facts, self._plan.places.result)
            self._tell(choice.why)
            self._steps.clear()
            path = self._go(choice.way, choice.result)
        return PreparedBackup(
            path=path,
            way=choice.way,
            result=choice.result,
            why=choice.why,
            plan=self._plan,
            steps=tuple(self._steps),
            written=self._written,
        )

    def _go(self, way: Way, result: ResultPlace) -> str:
        places = self._plan.places
        if way in ("storage", "writeback"):
            there = self._need(self._there)
            name = os.path.basename(places.storage_target)
            self._in_storage(os.path.join(there.path, name), way)
            return self._land(there, name)
        local = self._local
        if way == "overlay":
            return self._over()
        name = os.path.basename(places.scratch_target)
        copy = os.path.join(local.path, name)
        with self._step("copy"):
            bar = self._bar("copying to scratch")
            before = copy_to_scratch(self._source, copy, digests=result == "storage", progress=bar)
        self._apply(copy, self._plan.settings.without_mount())
        if result == "scratch":
            self._owned(copy, sync=False)
            self._flushed(copy)
            return self._land(local, name)
        return self._put_back(copy, before, None)

    @staticmethod
    def _need(work: WorkFolder | None) -> WorkFolder:
        if work is None:
            raise StorageError("this storage cannot clone folders")
        return work

    def _land(self, work: WorkFolder, name: str) -> str:
        """Move the result to its target, unless the backup changed during the prepare."""
        if stamps(self._source) != self._plan.backup.stamps:
            raise StorageError(
                f"{self._source} changed during the prepare: the result is removed",
                hint="does a program write to the backup?",
            )
        return work.move_up(name)

    @contextmanager
    def _step(self, what: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self._steps.append((what, time.monotonic() - start))

    def _clone(self, target: str) -> None:
        if not isinstance(self._storage, FolderCloning):
            raise StorageError(f"the storage of {self._source} cannot clone folders")
        with self._step("clone"):
            self._storage.clone_folder(self._source, target)

    def _in_storage(self, clone: str, way: Way) -> None:
        settings = self._plan.settings
        if way == "writeback" and settings.client is None:
            settings = replace(settings, client=self._writeback())
        if settings.client is not None and settings.client.cache_dir is None:
            # Data that waits for its upload needs the scratch space that was checked.
            cache = os.path.join(self._local.path, "cache")
            os.makedirs(cache, mode=0o700, exist_ok=True)
            settings = replace(settings, client=replace(settings.client, cache_dir=cache))
        if not os.path.lexists(clone):  # it exists if a private mount was refused
            self._clone(clone)
        self._apply(clone, settings)
        if settings.client is None:
            self._owned(clone, sync=True)

    def _writeback(self) -> ClientOptions:
        wanted = self._plan.facts.data_bytes + 2 * self._plan.facts.changed_bytes
        return ClientOptions(
            writeback=True,
            upload_delay_s=_UPLOAD_DELAY_S,
            cache_bytes=max(min(wanted, self._plan.facts.scratch_free_bytes // 2), 256 << 20),
        )

    def _apply(self, folder: str, settings: ApplySettings) -> None:
        # Not in the storage: it is slow, and a private mount does not see the writes of another mount.
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
        for what, seconds in (
            ("warm-up", ran.warm_up_s),
            ("prepare", ran.tool_s),
            ("upload", ran.settle_s + ran.unmount_s),
        ):
            if seconds:
                self._steps.append((what, seconds))
        state = read_info(folder).state
        if state != "prepared":
            raise StorageError(
                f"{self._tool.name} finished, but the backup is still {state}", hint="does a tool option stop it early?"
            )

    def _keep_log(self, log: str) -> str | None:
        """Copy the log of a failed tool to the scratch folder; return its path."""
        kept = os.path.join(self._plan.places.scratch, f"snapmgr-prepare-{os.getpid()}.log")
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
            # In MiB, because the bar shows no units; rounded up, so that the bar is full only at the end.
            total = -(-total_bytes >> 20)
            self._progress(f"{what} (MiB)", total if done_bytes >= total_bytes else done_bytes >> 20, total)

        return show

    def _show(self, now: Progress) -> None:
        if now.expected_bytes:
            self._bar(now.phase)(min(now.done_bytes, now.expected_bytes), now.expected_bytes)

    def _owned(self, folder: str, *, sync: bool) -> None:
        with self._step("owners and flush" if sync else "owners"):
            take_owners(self._source, folder, sync=sync)

    def _flushed(self, folder: str) -> None:
        with self._step("flush"):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                sync_file_system(fd)
            except OSError as error:
                raise StorageError(f"cannot flush the file system of {folder}: {error.strerror}") from error
            finally:
                os.close(fd)

    def _over(self) -> str:
        work = os.path.join(self._local.path, "overlay")
        os.mkdir(work, 0o700)
        before = outline_of(self._source)
        with overlay(self._source, work) as (merged, upper):
            self._apply(merged, self._plan.settings.without_mount())
            changed = copied_up(upper)
            self._tell(f"{len(changed)} of {len(before.sizes)} files changed")
            return self._put_back(merged, before, changed)

    def _put_back(self, prepared: str, before: Tree, only: set[str] | None) -> str:
        there = self._need(self._there)
        name = os.path.basename(self._plan.places.storage_target)
        clone = os.path.join(there.path, name)
        self._clone(clone)
        with self._step("write back"):
            bar = self._bar("comparing and writing back")
            self._written = write_back(prepared, clone, before, only=only, progress=bar)
        self._tell(
            f"{format_size(self._written.changed_bytes)} in {self._written.changed_files} files written back in "
            f"{format_duration(self._steps[-1][1])}"
        )
        self._owned(clone, sync=True)
        return self._land(there, name)
