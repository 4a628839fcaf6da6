"""Defines rungs: settings of a prepare in its storage, their limits, and the time of one run."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct
from msgspec.structs import fields, replace

from snapmgr.contract.records import ClientOptions
from snapmgr.contract.units import format_duration, format_size

Dimension = Literal[
    "use-memory",
    "flush-method",
    "io-threads",
    "writeback",
    "upload-delay",
    "cache-size",
    "cache-folder",
    "warm-up",
    "max-uploads",
    "kernel-writeback",
]

DEFAULT_MEMORY_BYTES = 100 << 20
"""The tools' default of ``--use-memory``."""
DEFAULT_UPLOADS = 20
"""The client's default of ``--max-uploads``."""


class RungSettings(Struct, frozen=True, kw_only=True):
    """How to prepare in the storage. Hashable; the defaults are those of the tool and of the client."""

    use_memory_bytes: int | None = None
    flush_method: str | None = None
    io_threads: int | None = None
    """Number for reading and number for writing, for xtrabackup only: mariadb-backup always uses one of each."""
    writeback: bool = False
    upload_delay_s: float = 0.0
    cache_bytes: int | None = None
    cache_dir: str | None = None
    """A folder in which each mount gets a fresh cache folder."""
    warm_up: bool = False
    max_uploads: int | None = None
    kernel_writeback: bool = False
    """FUSE's own cache of writes, "-o writeback_cache": small writes reach the client joined."""
    extra_mount: tuple[str, ...] = ()
    """The user's own options of the client; the search never changes them."""
    extra_tool: tuple[str, ...] = ()
    """The user's own options of the tool."""

    def client_options(self, cache_dir: str | None = None) -> ClientOptions:
        """Return how to mount; `cache_dir` is the fresh folder for this one mount."""
        extra = list(self.extra_mount)
        if self.max_uploads is not None:
            extra += ["--max-uploads", str(self.max_uploads)]
        if self.kernel_writeback:
            extra += ["-o", "writeback_cache"]
        return ClientOptions(
            writeback=self.writeback,
            upload_delay_s=self.upload_delay_s,
            cache_bytes=self.cache_bytes,
            cache_dir=cache_dir,
            extra=tuple(extra),
        )

    def tool_options(self) -> tuple[str, ...]:
        """Return the tool's options except for its memory."""
        found = list(self.extra_tool)
        if self.flush_method is not None:
            found.append(f"--innodb-flush-method={self.flush_method}")
        if self.io_threads is not None:
            found += [f"--innodb-read-io-threads={self.io_threads}", f"--innodb-write-io-threads={self.io_threads}"]
        return tuple(found)

    def words(self) -> tuple[str, ...]:
        """Return each setting that differs from the defaults, in words."""
        found = {
            f"use-memory {format_size(self.use_memory_bytes or 0)}": self.use_memory_bytes,
            f"flush method {self.flush_method}": self.flush_method,
            f"{self.io_threads} io threads": self.io_threads,
            "writeback": self.writeback,
            f"upload delay {format_duration(self.upload_delay_s)}": self.upload_delay_s,
            f"cache {format_size(self.cache_bytes or 0)}": self.cache_bytes,
            f"cache in {self.cache_dir}": self.cache_dir,
            "warm-up": self.warm_up,
            f"{self.max_uploads} uploads at once": self.max_uploads,
            "FUSE writeback cache": self.kernel_writeback,
        }
        return (*(word for word, there in found.items() if there), *self.extra_mount, *self.extra_tool)

    def __str__(self) -> str:
        return ", ".join(self.words()) or "default"


class TuningLimits(Struct, frozen=True, kw_only=True):
    """Limits of the settings on this machine, for this backup."""

    data_bytes: int
    memory_bytes: int
    """Upper limit of ``--use-memory``."""
    private: bool
    """Whether a further mount of the storage is possible, with its own options and cache."""
    cache_bytes: int = 0
    """Upper limit of the cache on its default disk."""
    client_cache_bytes: int = 100 << 30
    """The client's default."""
    cache_dirs: tuple[str, ...] = ()
    """Folders on other disks, or in memory, for the cache."""
    io_threads: bool = False
    """Whether the tool uses them."""


class Run(Struct, frozen=True, kw_only=True):
    """One prepare on a fresh clone with a cold cache, reduced to the fields that the search needs."""

    settings: RungSettings
    seconds: float
    """Warm-up, prepare and the remaining uploads, until everything is in the storage."""
    cut: bool = False
    """Ended before it was done: it would have taken longer than `seconds`."""
    bottleneck: str = "unknown"
    """As `snapmgr.trace.verdict` names it."""


def changes(old: RungSettings, new: RungSettings) -> str:
    """Describe the changes from the first rung to the second: "+ writeback", "− warm-up"."""
    before, after = old.words(), new.words()
    found = [f"+ {word}" for word in after if word not in before]
    # For a setting with another value, name only the new value.
    changed = {name for name in _given(old) if name in _given(new)}
    gone = old if not changed else replace(old, **{name: getattr(RungSettings(), name) for name in changed})
    found += [f"− {word}" for word in gone.words() if word not in after]
    return ", ".join(found) or "once more"


def _given(settings: RungSettings) -> set[str]:
    """Return the attributes that differ from the defaults."""
    names = (field.name for field in fields(settings))
    return {name for name in names if getattr(settings, name) != getattr(RungSettings(), name)}


def with_room(settings: RungSettings, cache_bytes: int, limits: TuningLimits) -> RungSettings:
    """Return `settings` with a cache of at least `cache_bytes`, limited by the available room."""
    has = settings.cache_bytes if settings.cache_bytes is not None else limits.client_cache_bytes
    wanted = min(cache_bytes, limits.cache_bytes)
    return settings if has >= wanted else replace(settings, cache_bytes=wanted)
