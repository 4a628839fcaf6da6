"""A mounted JuiceFS volume as its own files tell it: the folder's ``.config``, ``.stats`` and ``.accesslog``."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snapmgr.errors import ConfigError, LackingError, NotFoundError, SnapmgrError
from snapmgr.trace.counters import read_counters

if TYPE_CHECKING:
    from pathlib import Path

# With --prefix-internal all these names begin with ".jfs".
_PREFIXES = (".", ".jfs.")
_DELAY_UNIT_S = 1e-9


@dataclass(frozen=True, kw_only=True)
class Mounted:
    """A mount's root, and what its `.config` says; no key, no password."""

    point: Path
    prefix: str
    version: str
    volume: str
    volume_id: str
    writeback: bool
    upload_delay_s: float
    cache_bytes: int

    @property
    def log(self) -> str:
        """Path of the log of operations."""
        return f"{self.point}/{self.prefix}accesslog"

    @property
    def stats(self) -> str:
        """Path of the counters."""
        return f"{self.point}/{self.prefix}stats"

    def counters(self) -> dict[str, float]:
        """Return the counters as they are now. Raises SnapmgrError when the mount is gone."""
        return read_counters(_read(self.stats).decode("utf-8", "replace"))


def find_mount(path: Path) -> Mounted:
    """Given any path on a JuiceFS mount, return what is known of the mount.

    Raises NotFoundError, ConfigError if it is on no JuiceFS, LackingError without the right to look.
    """
    if not os.path.exists(path):
        raise NotFoundError(f"{path} does not exist")
    point = path.resolve()
    while not point.is_mount():
        point = point.parent
    prefix = next((prefix for prefix in _PREFIXES if os.path.lexists(point / f"{prefix}accesslog")), None)
    if prefix is None:
        raise ConfigError(
            f"{path} is on no mount of JuiceFS: {point} has no .accesslog",
            hint="name the folder where the volume's root is mounted: findmnt -t fuse.juicefs",
        )
    try:
        config: dict[str, Any] = json.loads(_read(f"{point}/{prefix}config"))
        return Mounted(
            point=point,
            prefix=prefix,
            version=str(config["Version"]),
            volume=str(config["Format"]["Name"]),
            volume_id=str(config["Format"]["UUID"]),
            writeback=bool(config["Chunk"].get("Writeback")),
            upload_delay_s=float(config["Chunk"].get("UploadDelay") or 0) * _DELAY_UNIT_S,
            cache_bytes=int(config["Chunk"].get("CacheSize") or 0),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise SnapmgrError(f"{point}/{prefix}config is not understood: {error}") from None


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except PermissionError:
        raise LackingError(f"no right to read {path}", hint="run as root, or as the user who mounted it") from None
    except OSError as error:
        raise SnapmgrError(f"cannot read {path}: {error.strerror}") from None
