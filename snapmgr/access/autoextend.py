"""Giving snapshots more room while a command uses them: what is read from a snapshot that runs full is lost."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from snapmgr.contract.abilities import CapacityReporting
from snapmgr.contract.errors import SnapmgrError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.catalog.manifest import Manifest
    from snapmgr.context import Context
    from snapmgr.contract.records import SnapshotRef

EVERY_S = 5.0


@contextmanager
def auto_extended(ctx: Context, manifest: Manifest) -> Iterator[None]:
    """While the context lasts, give a snapshot more room as it fills up, where its backend can and is told to.

    What goes wrong with that is told, and ends nothing: whether the snapshot was lost shows afterwards.
    """
    watched: list[tuple[CapacityReporting, SnapshotRef]] = []
    for member in manifest.members:
        backend = ctx.backend(member.ref.backend)
        if isinstance(backend, CapacityReporting):
            watched.append((backend, member.ref))
    if not watched:
        yield
        return
    over = threading.Event()
    thread = threading.Thread(target=_watch, args=(ctx, watched, over), name="relief", daemon=True)
    # A thread inherits what is blocked. Signals are for the main thread, which holds them back for whole steps.
    old = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
    try:
        yield
    finally:
        over.set()
        # A command that enlarges something is waited for: it may hold devices suspended.
        thread.join()


def _watch(ctx: Context, watched: list[tuple[CapacityReporting, SnapshotRef]], over: threading.Event) -> None:
    told: set[str] = set()
    while True:
        for backend, ref in watched:
            try:
                said = backend.auto_extend(ref)
            except SnapmgrError as error:
                said = f"warning: {error.message}"
            if said is not None and said not in told:
                told.add(said)
                ctx.tell(said)
        if over.wait(EVERY_S):
            return
