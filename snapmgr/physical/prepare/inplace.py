"""Runs a tool's prepare in place on a clone, optionally through a private mount of the storage."""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from snapmgr.contract.errors import MissingRequirementError, SnapmgrError, StorageError
from snapmgr.contract.units import format_size
from snapmgr.physical.tools.request import ApplyRequest, Progress

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapmgr.contract.abilities import ClientMount, Remounting
    from snapmgr.contract.records import ClientOptions
    from snapmgr.physical.tools.request import Tool

_LEAST_MEMORY_BYTES = 128 << 20
_MOST_MEMORY_BYTES = 8 << 30
_SETTLE_S = 24 * 3600.0


class NoMountError(MissingRequirementError):
    """The storage could not be mounted privately; nothing has changed yet."""


class ApplySettings(Struct, frozen=True, kw_only=True):
    """Options of the tool and of its private mount."""

    use_memory_bytes: int = 0
    """The tool's buffer pool; 0: its own default."""
    tool_options: tuple[str, ...] = ()
    client: ClientOptions | None = None
    """Options of a private mount; None: use the existing mount."""
    warm_up: bool = False
    """Whether the private mount first reads the backup into its cache."""

    def without_mount(self) -> ApplySettings:
        """Return the tool's settings alone."""
        return replace(self, client=None, warm_up=False)


class ApplyTimes(Struct, frozen=True, kw_only=True):
    """Duration of each step."""

    warm_up_s: float
    tool_s: float
    after_s: float
    """Of the caller's step: owners and flush."""
    settle_s: float
    """Until everything was in the storage itself."""
    unmount_s: float


def choose_memory(redo_bytes: int, available_bytes: int) -> int:
    """Return the default buffer pool: the pages that the redo log changes, at most a quarter of free memory."""
    # One page for each 3.6 KB of redo: four times the log, and some room.
    wanted = max(5 * redo_bytes, _LEAST_MEMORY_BYTES)
    return min(wanted, _MOST_MEMORY_BYTES, max(available_bytes // 4, _LEAST_MEMORY_BYTES))


def apply_in_place(
    folder: str,
    tool: Tool,
    settings: ApplySettings,
    *,
    log: str,
    storage: Remounting | None = None,
    time_limit_s: float | None = None,
    tell: Callable[[str], None] = lambda _line: None,
    progress: Callable[[Progress], None] = lambda _progress: None,
    watching: Callable[[ClientMount], AbstractContextManager[object]] = lambda _mount: nullcontext(),
    after: Callable[[str], None] = lambda _folder: None,
) -> ApplyTimes:
    """Prepare the backup in `folder`, which is a clone and ours, in place.

    Args:
        folder: the clone.
        tool: as `snapmgr.physical.tools.choose.tool_for` chose it.
        settings: of the tool, and of a private mount.
        log: where the tool's log goes; it stays.
        storage: makes the private mount; needed if `settings.client` is set.
        time_limit_s: of the tool.
        tell: receives messages for the user.
        progress: receives the tool's progress.
        watching: a context around the tool's run that gets the private mount, to read its counters.
        after: called with the folder, as the tool saw it, before the private mount is unmounted.

    Everything is in the storage itself when this returns. Raises NoMountError, and the errors of the tool and `settle`.
    """

    def applied(where: str) -> float:
        start = time.monotonic()
        tool.apply(
            ApplyRequest(
                folder=where,
                log=log,
                use_memory_bytes=settings.use_memory_bytes,
                options=settings.tool_options,
                time_limit_s=time_limit_s,
                progress=progress,
            )
        )
        return time.monotonic() - start

    if settings.client is None:
        tool_s = applied(folder)
        start = time.monotonic()
        after(folder)
        return ApplyTimes(warm_up_s=0.0, tool_s=tool_s, after_s=time.monotonic() - start, settle_s=0.0, unmount_s=0.0)
    if storage is None:
        raise StorageError(
            "this storage has no client program that can be mounted with other options",
            hint="leave the mount options out",
        )
    parent, name = os.path.split(folder)
    with ExitStack() as stack:
        try:
            mount = stack.enter_context(storage.client_mount(parent, settings.client))
        except SnapmgrError as error:
            raise NoMountError(f"no private mount: {error.message}", hint=error.hint) from error
        inside = os.path.join(mount.path, name)
        start = time.monotonic()
        if settings.warm_up:
            tell("reading the backup into the cache of the private mount")
            mount.warm_up(inside)
        warm_up_s = time.monotonic() - start
        with watching(mount):
            tool_s = applied(inside)
        start = time.monotonic()
        after(inside)
        after_s, start = time.monotonic() - start, time.monotonic()
        mount.settle(_SETTLE_S, lambda left: tell(f"{format_size(left)} left to upload"))
        settled = time.monotonic()
    return ApplyTimes(
        warm_up_s=warm_up_s,
        tool_s=tool_s,
        after_s=after_s,
        settle_s=settled - start,
        unmount_s=time.monotonic() - settled,
    )
