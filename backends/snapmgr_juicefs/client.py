"""Reads a mounted JuiceFS client's `.config` and `.stats`, and finds the blocks in its cache that await upload."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from snapmgr.api import Mount, StorageError, format_size
from snapmgr.api.kernel import holder, lies_in, shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

FS_TYPE = "fuse.juicefs"
_ROOT_INODE = 1
# With --prefix-internal the client's own files have other names.
_CONFIG = (".config", ".jfs.config")
_STATS = (".stats", ".jfs.stats")
_STAGING = "rawstaging"
_READ = "raw"
# If the remainder does not shrink for this long, uploads have stopped: the object store is gone or refuses.
_NO_PROGRESS_S = 180.0
_POLL_S = 0.05


class Client(Struct, frozen=True, kw_only=True):
    """A mount of a volume. Keys and passwords in its configuration are never kept."""

    mount: Mount
    name: str
    """The volume's."""
    uuid: str
    subdir: str
    """The mounted part of the volume: "" for all, otherwise "/folder"."""
    pid: int
    read_only: bool
    writeback: bool
    cache_dirs: tuple[str, ...]
    capacity_bytes: int
    """The volume's limit; 0: none."""
    trash_days: int
    dumps_every_s: float
    """How often it dumps the metadata into the object store; 0: never."""
    storage: str
    block_bytes: int
    version: str

    @property
    def point(self) -> str:
        """Its mount point."""
        return self.mount.point

    def inside(self, path: str) -> str:
        """Given a real path in the mount, return its path in the volume: "/folder/…"."""
        return os.path.normpath(f"{self.subdir}/{os.path.relpath(path, self.point)}")

    def outside(self, path: str) -> str | None:
        """Given a path in the volume, return its path in this mount; None if the mount does not show it."""
        if not lies_in(path, self.subdir or "/"):
            return None
        return os.path.normpath(os.path.join(self.point, os.path.relpath(path, self.subdir or "/")))

    def counters(self) -> dict[str, float]:
        """Return its current counters. Raises StorageError if it does not answer."""
        text = _read(self.point, _STATS)
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("juicefs_"))
        return {name: float(value) for name, value in (line for line in lines if len(line) == 2)}  # noqa: PLR2004

    def staged(self) -> dict[str, int]:
        """Return the files in its cache folder that await upload, with their sizes."""
        return staged(self.cache_dirs)

    def read_dirs(self) -> tuple[str, ...]:
        """Return the folders of its read cache: any of their files may be removed at any time."""
        return tuple(os.path.join(folder, _READ) for folder in self.cache_dirs)


def staged(cache_dirs: Sequence[str]) -> dict[str, int]:
    """Return the blocks in cache folders that await upload, with their sizes."""
    found: dict[str, int] = {}
    for cache_dir in cache_dirs:
        for base, _, names in os.walk(os.path.join(cache_dir, _STAGING)):
            for name in names:
                path = os.path.join(base, name)
                try:
                    found[path] = os.stat(path).st_size
                except FileNotFoundError:
                    continue
    return found


def recognise(mount: Mount) -> Client:
    """Return the client of a mount of type fuse.juicefs. Raises StorageError if it does not answer.

    The mount must be the client's own (not a bind mount of a folder in it).
    """
    try:
        config = json.loads(_read(mount.point, _CONFIG))
        own, form, chunk = config["Meta"], config["Format"], config["Chunk"]
        return Client(
            mount=mount,
            name=form["Name"],
            uuid=form["UUID"],
            subdir=_subdir(own.get("Subdir") or ""),
            pid=config.get("Pid") or 0,
            read_only=bool(own.get("ReadOnly")),
            writeback=bool(chunk.get("Writeback")),
            cache_dirs=_cache_dirs(chunk.get("CacheDir") or ""),
            capacity_bytes=form.get("Capacity") or 0,
            trash_days=form.get("TrashDays") or 0,
            dumps_every_s=0.0 if own.get("NoBGJob") else (config.get("BackupMeta") or 0) / 1e9,
            storage=form.get("Storage") or "",
            block_bytes=(form.get("BlockSize") or 0) * 1024,
            version=config.get("Version") or "",
        )
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(
            f"the JuiceFS client at {shown(mount.point)} has a .config that cannot be understood: {error!r}",
            hint="is it the Community Edition, 1.2 or newer?",
        ) from None


def _subdir(told: str) -> str:
    stripped = told.strip("/")
    return f"/{stripped}" if stripped else ""


def _cache_dirs(told: str) -> tuple[str, ...]:
    return tuple(part for part in told.split(":") if part and part != "memory")


def _read(point: str, names: tuple[str, ...]) -> str:
    for name in names:
        try:
            return Path(point, name).read_text(encoding="utf-8")
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StorageError(
                f"cannot read {shown(point)}/{name}: {error.strerror}",
                hint="only root may" if isinstance(error, PermissionError) else "does its client still run?",
            ) from error
    raise StorageError(
        f"the mount at {shown(point)} has no {names[0]}",
        hint="is it a mount of the whole volume or of a --subdir, by JuiceFS 1.2 or newer?",
    )


def own_mount(path: str, mounts: Sequence[Mount]) -> Mount | None:
    """Given a real path, return the client's own mount for it; None if it is not on JuiceFS.

    For a bind mount it is another mount of the same device whose root is the client's. The path in it differs: see
    `translate`.
    """
    held = holder(path, mounts)
    if held.fs_type != FS_TYPE:
        return None
    if held.root == "/":
        return held
    return next((mount for mount in mounts if mount.device == held.device and mount.root == "/"), None)


def translate(path: str, mounts: Sequence[Mount], own: Mount) -> str:
    """Given a real path and the client's own mount of it, return the path in that mount."""
    held = holder(path, mounts)
    if held is own:
        return path
    return os.path.normpath(os.path.join(own.point, held.root.lstrip("/"), os.path.relpath(path, held.point)))


def clients(mounts: Sequence[Mount], *, first: str = "") -> Iterator[Client]:
    """Yield every client that answers, beginning with the one mounted at `first`."""
    own = [mount for mount in mounts if mount.fs_type == FS_TYPE and mount.root == "/"]
    for mount in sorted(own, key=lambda mount: mount.point != first):
        try:
            if os.stat(mount.point).st_ino != _ROOT_INODE:
                continue  # something is mounted over it
            yield recognise(mount)
        except (StorageError, OSError):
            continue


def sessions(status: str) -> list[dict[str, Any]]:
    """Given the output of ``juicefs status``, return its sessions. Raises StorageError."""
    try:
        return list(json.loads(status[status.index("{") :]).get("Sessions") or ())
    except (ValueError, AttributeError) as error:
        raise StorageError(f"`juicefs status` said nothing that can be understood: {error}") from None


def wait_uploaded(client: Client, timeout_s: float | None, tell: Callable[[int], None] | None = None) -> None:
    """Wait until everything staged now in a client's cache is uploaded; None: as long as it makes progress.

    It does not wait for later writes. Raises StorageError at the limit, or if the client is gone.
    """
    waiting = client.staged()
    started = progressed = time.monotonic()
    left = sum(waiting.values())
    process = f"/proc/{client.pid}"
    # Its process is not visible from another process namespace.
    watched = client.pid > 0 and os.path.exists(process)
    visible = all(os.path.isdir(folder) for folder in client.cache_dirs)
    while waiting or (not visible and client.counters().get("juicefs_staging_blocks", 0)):
        if tell is not None:
            tell(left)
        now = time.monotonic()
        if watched and not os.path.exists(process):
            raise StorageError(
                f"the client at {shown(client.point)} is gone, and {format_size(left)} are still only in its cache "
                f"({', '.join(shown(folder) for folder in client.cache_dirs)})",
                hint="mount the volume again with the same cache folder: it uploads them",
            )
        if (timeout_s is not None and now > started + timeout_s) or (
            timeout_s is None and now > progressed + _NO_PROGRESS_S
        ):
            raise StorageError(
                f"{format_size(left)} are still only in the cache of the client at {shown(client.point)} "
                f"({', '.join(shown(folder) for folder in client.cache_dirs)}), not in the object store",
                hint="keep the cache folder; is the object store reachable, or an upload delay set?",
            )
        time.sleep(_POLL_S)
        waiting = {path: size for path, size in waiting.items() if os.path.exists(path)}
        if sum(waiting.values()) != left:
            left, progressed = sum(waiting.values()), time.monotonic()
    if tell is not None:
        tell(0)
