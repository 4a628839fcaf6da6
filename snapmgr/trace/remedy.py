"""Words what to try against a bottleneck: a command for a prepare, an option of the mount for any other program."""

from __future__ import annotations

import shlex
from typing import Literal

from snapmgr.contract.units import format_size

Action = Literal[
    "use-memory", "cache-size", "warm-up", "writeback", "upload-delay", "flush-method", "scratch", "record", "none"
]

_PREPARE: dict[Action, tuple[str, str]] = {
    "use-memory": (
        "give the tool enough memory for all pages that it changes, so that it flushes less often",
        "--strategy storage --use-memory SIZE",
    ),
    "cache-size": ("let the cache hold the whole folder", "--mount-option cache-size=4G"),
    "writeback": ("on a mount that nobody else uses, upload in the background", "--mount-option writeback"),
    "upload-delay": (
        "the mount has writeback: let uploads wait until the tool is done",
        "--mount-option writeback --mount-option upload-delay=1h",
    ),
    "flush-method": (
        "let the tool leave flushing to fsync",
        "--strategy storage --tool-option=--innodb-flush-method=fsync",
    ),
    "scratch": ("prepare a copy on a local disk, the quickest way in nearly all measured cases", "--strategy scratch"),
}
_OTHER: dict[Action, str] = {
    "use-memory": "give the program enough memory for all data that it changes, so that it flushes less often",
    "cache-size": "let the cache hold the whole folder: juicefs mount … --cache-size MIB",
    "writeback": "on a mount that nobody else uses, upload in the background: juicefs mount … --writeback",
    "upload-delay": "the mount has writeback: let uploads wait until the program is done: juicefs mount … --writeback "
    "--upload-delay 1h",
    "flush-method": "let the program flush its files less often",
    "scratch": "work on a copy on a local disk",
}


def remedy(action: Action, *, prepares: bool, folder: str | None) -> str:
    """Return in one sentence what to try.

    Args:
        action: what helps; not "record" or "none".
        prepares: whether the program prepares a backup; only then is there a command of ours for it.
        folder: what the program works on; None if it is not known.
    """
    if action == "warm-up":
        return f"warm the cache first: juicefs warmup {shlex.quote(folder) if folder else 'FOLDER'}"
    if not prepares:
        return _OTHER[action]
    what, options = _PREPARE[action]
    return f"{what}: snapmgr prepare {shlex.quote(folder) if folder else 'FOLDER'} {options}"


def too_little_room(free_bytes: int, data_bytes: int) -> str:
    """Say that the local disk cannot hold a copy of the data."""
    return (
        f"work on a local disk; its {format_size(free_bytes)} free are too little for a copy of "
        f"{format_size(data_bytes)}, so only changed data can be kept there"
    )
