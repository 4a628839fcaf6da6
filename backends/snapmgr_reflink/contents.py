"""Reads what is in a store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from snapmgr.api import Found, Pool, StorageError
from snapmgr_reflink import store, tree

if TYPE_CHECKING:
    from collections.abc import Iterator


def boxes(store_fd: int, path: str) -> Iterator[store.Box]:
    """Open one after another all boxes that are ours; each is closed when the next one is asked for."""
    for name in sorted(entry.name for entry in tree.entries(store_fd)):
        with store.box(store_fd, path, name) as box:
            if box is not None:
                yield box


def refuse_foreign(store_fd: int, path: str, name: str) -> None:
    """Raise StorageError if something that is not ours has this name; ours has just been removed."""
    try:
        if "/" not in name:
            os.stat(name, dir_fd=store_fd, follow_symlinks=False)
            raise StorageError(
                f"{tree.shown(path)}/{tree.shown(name)} is not what snapmgr made: it is left alone",
                hint="look at it and move it away",
            )
    except FileNotFoundError:
        return


def describe(box: store.Box, pool: Pool, boot_id: str, backend: str) -> Found:
    """Say what a box is. A copy that was made but not yet safe on disk counts only until the next boot."""
    mark = box.mark
    if mark is None or box.name.startswith(("begun@", "deleting@")):
        why = "its deletion was interrupted" if box.name.startswith("deleting@") else "it was only just begun"
    elif box.state == "begun":
        why = "it was never finished"
    elif box.state == "made" and mark.boot_id != boot_id:
        why = "the machine stopped before it was safe on disk"
    else:
        return Found(
            kind=mark.kind,
            pool=pool,
            name=box.name,
            snapshot_id=mark.snapshot_id,
            ref=store.reference(box, pool, backend),
            record_id=mark.record_id or None,
            note=store.read_note(box),
        )
    return Found(
        kind="debris",
        pool=pool,
        name=box.name,
        snapshot_id=mark.snapshot_id if mark else None,
        record_id=(mark.record_id or None) if mark else None,
        why=why,
    )
