"""Gives a job on btrfs a long history in seconds: real snapshots, and manifests like those of a real one."""

from __future__ import annotations

import os
import secrets
import subprocess
import uuid
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING
from unittest.mock import patch

import btrfsutil
from msgspec.structs import replace

from snapmgr.catalog.manifest import encode
from snapmgr.system.kernel import sync_file_system
from snapmgr_btrfs import folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from snapmgr.catalog.manifest import Manifest
    from snapmgr.catalog.store import Catalog


@contextmanager
def unflushed(top: Path, *others: Path) -> Iterator[None]:
    """Let neither the btrfs at `top` nor an fsync of ours wait for the disk; flush `top` and `others` at the end."""
    with ExitStack() as stack:
        for path in (top, *others):
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            stack.callback(os.close, fd)
            stack.callback(sync_file_system, fd)
        stack.callback(_remount, top, "barrier")
        _remount(top, "nobarrier")
        stack.enter_context(patch("os.fsync", lambda _fd: None))
        yield


def add_history(catalog: Catalog, top: Path, job: str, count: int, *, every_s: float = 60.0) -> list[Manifest]:
    """Add older snapshots to `job`, `every_s` apart, until it has `count`; return the added ones, newest first.

    It has at least one, of one subvolume of the btrfs mounted at `top`. What is added has storage of its own, a note
    beside it and a manifest that the catalog itself stored. 10,000 take about half a minute.
    """
    entries = catalog.entries(job)[0]
    model = entries[0].manifest
    added: list[Manifest] = []
    with unflushed(top, catalog.path), ExitStack() as stack:
        origin = os.open(model.members[0].path, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, origin)
        boxes = os.open(top / ".snapmgr", os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, boxes)
        for number in range(1, count - len(entries) + 1):
            manifest = _older(model, number, number * timedelta(seconds=every_s))
            name = manifest.members[0].ref.name
            btrfsutil.create_snapshot(origin, f"/proc/self/fd/{boxes}/{name}", read_only=True)
            native_id = str(uuid.UUID(bytes=btrfsutil.subvolume_info(f"/proc/self/fd/{boxes}/{name}").uuid))
            member = manifest.members[0]
            manifest = replace(manifest, members=(replace(member, ref=replace(member.ref, native_id=native_id)),))
            folder.write_note(boxes, name, encode(manifest))
            catalog.write(manifest)
            added.append(manifest)
    return added


def _remount(top: Path, option: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{option}", top], check=True, stdin=subprocess.DEVNULL)


def _older(model: Manifest, number: int, earlier: timedelta) -> Manifest:
    """Return a manifest like `model`, of a snapshot that was taken earlier, under a name of its own."""
    assert model.taken_at is not None
    assert model.proved_at is not None
    created_at = model.created_at - earlier
    name = f"{model.job}.{created_at:%Y%m%dT%H%M%SZ}.{secrets.token_hex(4)}"
    (intent,), (member,) = model.intents, model.members
    return replace(
        model,
        id=name,
        number=model.number - number,
        created_at=created_at,
        taken_at=model.taken_at - earlier,
        proved_at=model.proved_at - earlier,
        intents=(replace(intent, name=name),),
        members=(replace(member, ref=replace(member.ref, snapshot_id=name, name=name)),),
    )
