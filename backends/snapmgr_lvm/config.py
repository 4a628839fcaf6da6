"""Defines the table ``[backend.lvm]`` of the configuration."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, TypeVar

from msgspec import Struct

from snapmgr.api import parse_duration, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable

_Number = TypeVar("_Number", int, float)
_PERCENT = re.compile(r"(\d{1,4}(?:\.\d+)?)\s*%")
_CHUNKS_BYTES = tuple(1 << power for power in range(12, 20))


class LvmConfig(Struct, frozen=True, kw_only=True):
    """The settings for LVM. Sizes and durations are texts, as everywhere: "20%", "10G", "24h"."""

    kind: Literal["auto", "classic", "thin"] = "auto"
    """"auto": thin snapshots of thin volumes, classic ones of others. "classic" also works for a thin volume."""
    cow_size: str = "20%"
    """Room for a classic snapshot's CoW table: a share of its origin, a size, or "forecast" from the measured write
    rate and `cow_lifetime`."""
    cow_lifetime: str = "24h"
    """Planned lifetime of a classic snapshot, for the forecast."""
    chunk_size: str = "auto"
    """Chunk size of a classic snapshot: a power of 2 from 4K to 512K. "auto": 16K, InnoDB's page."""
    pool_data_limit: str = "80%"
    """Data usage of a thin pool above which we do not take another snapshot."""
    pool_metadata_limit: str = "80%"
    """The same limit for its metadata."""
    scratch_dir: str = "/var/tmp/snapmgr"  # noqa: S108 - made 0700 by us, and checked
    """Folder for the writes to attachments of classic snapshots; it must not be on a snapshotted volume."""
    scratch_size: str = "20%"
    """Limit of the writes to one attachment: a share of the origin, or a size. Writes allocate the space as needed."""
    auto_extend: bool = False
    """Whether classic snapshots that a command uses get more room as they fill up."""
    luks_key_file: str | None = None
    """Key of a LUKS container on the logical volume; required to attach its snapshots."""

    def __post_init__(self) -> None:
        for key in ("cow_size", "scratch_size"):
            text = getattr(self, key)
            if not (key == "cow_size" and text == "forecast"):
                _size_or_share(key, text)
        for key in ("pool_data_limit", "pool_metadata_limit"):
            if not 0 < _share(key, getattr(self, key)) <= 1:
                raise ValueError(f"{key}: must be above 0% and at most 100%")
        if _named("cow_lifetime", self.cow_lifetime, parse_duration) <= 0:
            raise ValueError("cow_lifetime: must be above 0")
        if self.chunk_size != "auto" and _named("chunk_size", self.chunk_size, parse_size) not in _CHUNKS_BYTES:
            raise ValueError(f"chunk_size: {self.chunk_size!r} is not a power of 2 from 4K to 512K")
        for key in ("scratch_dir", "luks_key_file"):
            path = getattr(self, key)
            if path is not None and not path.startswith("/"):
                raise ValueError(f"{key}: {path!r} is not an absolute path")

    @property
    def chunk_bytes(self) -> int:
        """Chunk size of a classic snapshot."""
        return 16 << 10 if self.chunk_size == "auto" else parse_size(self.chunk_size)

    @property
    def data_share(self) -> float:
        """`pool_data_limit`, 0 to 1."""
        return _share("pool_data_limit", self.pool_data_limit)

    @property
    def metadata_share(self) -> float:
        """`pool_metadata_limit`, 0 to 1."""
        return _share("pool_metadata_limit", self.pool_metadata_limit)


def size_of(text: str, whole_bytes: int) -> int:
    """Given "20%" or "10G", return the size in bytes; a share is one of `whole_bytes`."""
    found = _PERCENT.fullmatch(text.strip())
    return int(float(found[1]) / 100 * whole_bytes) if found else parse_size(text)


def _share(key: str, text: str) -> float:
    found = _PERCENT.fullmatch(text.strip())
    if found is None:
        raise ValueError(f'{key}: {text!r} is not a share: write "80%"')
    return float(found[1]) / 100


def _size_or_share(key: str, text: str) -> None:
    if _PERCENT.fullmatch(text.strip()):
        if _share(key, text) <= 0:
            raise ValueError(f"{key}: must be above 0%")
    elif text.strip().isdecimal():
        # A few bytes instead of an intended share: such a snapshot is lost immediately.
        raise ValueError(f'{key}: {text!r} has no unit: write "{text.strip()}%" for a share, or "{text.strip()}G"')
    elif _named(key, text, parse_size) <= 0:
        raise ValueError(f"{key}: must be above 0")


def _named(key: str, text: str, parse: Callable[[str], _Number]) -> _Number:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from None
