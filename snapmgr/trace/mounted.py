"""Describes a mounted JuiceFS volume by its virtual files ``.config``, ``.stats`` and ``.accesslog``."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snapmgr.contract.errors import ConfigError, MissingRequirementError, NotFoundError, SnapmgrError
from snapmgr.trace.counters import read_counters

if TYPE_CHECKING:
    from pathlib import Path

# With --prefix-internal all these names begin with ".jfs"; clients of the Cloud service before 4.7 have only ".oplog".
_LOGS = tuple((prefix, name) for prefix in (".", ".jfs.") for name in ("accesslog", "oplog"))
_DELAY_UNIT_S = 1e-9


@dataclass(frozen=True, kw_only=True)
class Mounted:
    """A mount's root and the facts of its `.config`, without keys and passwords."""

    point: Path
    log: str
    """Path of the log of operations."""
    stats: str
    """Path of the counters."""
    stats_inode: int | None
    """Inode of the counters; None without counters."""
    version: str | None
    volume: str
    volume_id: str | None
    writeback: bool | None
    upload_delay_s: float
    cache_bytes: int
    max_uploads: int
    """Parallel uploads; 0: unknown."""

    def counters(self) -> dict[str, float]:
        """Return the current counters, if there are any. Raises SnapmgrError if the mount is gone."""
        return read_counters(_read(self.stats).decode("utf-8", "replace")) if self.stats_inode is not None else {}


def find_mount(path: Path) -> Mounted:
    """Return the JuiceFS mount that holds a path.

    Raises NotFoundError, ConfigError if the path is not on JuiceFS, MissingRequirementError without the privilege to
    read the mount's files.
    """
    if not os.path.exists(path):
        raise NotFoundError(f"{path} does not exist")
    point = path.resolve()
    while not point.is_mount():
        point = point.parent
    prefix, name = next((log for log in _LOGS if os.path.lexists(point / "".join(log))), (None, ""))
    if prefix is None:
        raise ConfigError(
            f"{path} is not on a JuiceFS mount: {point} has no .accesslog",
            hint="name the folder where the volume's root is mounted: findmnt -t fuse.juicefs",
        )
    try:
        config: dict[str, Any] = json.loads(_read(f"{point}/{prefix}config"))
        format_, chunk = config.get("Format") or {}, config.get("Chunk") or {}
        return Mounted(
            point=point,
            log=f"{point}/{prefix}{name}",
            stats=f"{point}/{prefix}stats",
            stats_inode=_inode(f"{point}/{prefix}stats"),
            version=config.get("Version"),
            # Clients of the Cloud service write other keys there.
            volume=str(format_.get("Name") or point.name or "juicefs"),
            volume_id=format_.get("UUID"),
            writeback=chunk.get("Writeback"),
            upload_delay_s=float(chunk.get("UploadDelay") or 0) * _DELAY_UNIT_S,
            cache_bytes=int(chunk.get("CacheSize") or 0),
            max_uploads=int(chunk.get("MaxUpload") or 0),
        )
    except (ValueError, AttributeError, TypeError) as error:
        raise SnapmgrError(f"{point}/{prefix}config cannot be parsed: {error}") from None


def _inode(path: str) -> int | None:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return None


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except PermissionError:
        raise MissingRequirementError(
            f"no right to read {path}", hint="run as root, or as the user who mounted it"
        ) from None
    except OSError as error:
        raise SnapmgrError(f"cannot read {path}: {error.strerror}") from None
