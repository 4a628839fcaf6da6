"""Extends the space of snapshots while a command uses them: a snapshot that overflows cannot be read any more."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from snapmgr.contract.abilities import AutoExtending
from snapmgr.contract.errors import SnapmgrError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.catalog.manifest import Manifest
    from snapmgr.context import Context
    from snapmgr.contract.records import SnapshotRef

EVERY_S = 5.0


@contextmanager
def auto_extended(ctx: Context, manifest: Manifest) -> Iterator[None]:
    """While the context lasts, extend a snapshot's space as it fills up, where its backend can and is configured to.

    A failure is only reported: the command checks afterwards whether the snapshot was lost.
    """
    watched: list[tuple[AutoExtending, SnapshotRef]] = []
    for member in manifest.members:
        backend = ctx.backend(member.ref.backend)
        if isinstance(backend, AutoExtending):
            watched.append((backend, member.ref))
    if not watched:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(ctx, watched, ended), name="autoextend", daemon=True)
    # A thread inherits blocked signals. Only the main thread handles signals; it holds them back for whole steps.
    old = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
    try:
        yield
    finally:
        ended.set()
        # Wait for a command that enlarges something: it may hold devices suspended.
        thread.join()


def _watch(ctx: Context, watched: list[tuple[AutoExtending, SnapshotRef]], ended: threading.Event) -> None:
    reported: set[str] = set()
    while True:
        for backend, ref in watched:
            try:
                message = backend.auto_extend(ref)
            except SnapmgrError as error:
                message = f"warning: {error.message}"
            if message is not None and message not in reported:
                reported.add(message)
                ctx.tell(message)
        if ended.wait(EVERY_S):
            return
