"""Wraps libbtrfsutil's Python binding: typed as far as we use it, imported lazily; an error says what to install."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, cast

from snapmgr.api import MissingRequirementError, Reason, install_command

if TYPE_CHECKING:
    from collections.abc import Iterator

_READ_ONLY = 1  # BTRFS_ROOT_SUBVOL_RDONLY
_UNSET = bytes(16)
TOP_LEVEL_ID = 5


class SubvolumeInfo(Protocol):
    """The file system's facts of a subvolume; UUIDs are 16 bytes, all zero if unset."""

    id: int
    parent_id: int
    flags: int
    uuid: bytes
    parent_uuid: bytes
    received_uuid: bytes
    otransid: int
    ctransid: int


class Library(Protocol):
    """The module ``btrfsutil``. Its calls raise BtrfsUtilError, an OSError, and hold Python's global lock."""

    def create_snapshot(self, source: int, path: str, *, read_only: bool = False) -> None:
        """Snapshot the subvolume that descriptor `source` is open on, to `path`."""

    def subvolume_id(self, path: int | str) -> int:
        """Return the id of the subvolume that holds `path`."""

    def subvolume_info(self, path: int | str, id: int = 0) -> SubvolumeInfo:  # noqa: A002 - the library's own name
        """Return the facts of the subvolume whose own folder `path` is, or of the one with `id`."""

    def subvolume_path(self, path: int, id: int = 0) -> str:  # noqa: A002 - the library's own name
        """Return the path of subvolume `id` from the top of the file system."""

    def SubvolumeIterator(self, path: int, top: int = 0, *, info: bool = False) -> Iterator[tuple[str, int]]:  # noqa: N802
        """Iterate over the subvolumes below `top` as (path from there, id)."""

    def deleted_subvolumes(self, path: int) -> list[int]:
        """Return the ids of subvolumes that were deleted and whose space is not yet free."""


def problem() -> Reason | None:
    """Return why the library cannot be used, or None."""
    try:
        importlib.import_module("btrfsutil")
    except ModuleNotFoundError:
        return Reason(what="the Python library btrfsutil is not installed", hint=_hint())
    except ImportError as error:
        if "undefined symbol" in str(error):
            # 6.14 and later need a newer libbtrfsutil than Debian 12 has, and notice only when they are loaded.
            what = f"the Python library btrfsutil does not match the system's libbtrfsutil ({error})"
            return Reason(
                what=what, hint=install_command("--force-reinstall", "--no-binary", ":all:", "btrfsutil==6.13")
            )
        what = f"the Python library btrfsutil does not load ({error})"
        return Reason(what=what, hint=_hint())
    return None


def _hint() -> str:
    return f"apt-get install libbtrfsutil-dev gcc python3-dev, then {install_command('snapmgr[btrfs]')}"


def load() -> Library:
    """Return the library. Raises MissingRequirementError, with what to install."""
    reason = problem()
    if reason is not None:
        raise MissingRequirementError(reason.what, hint=reason.hint)
    return cast("Library", importlib.import_module("btrfsutil"))


def uuid_text(raw: bytes) -> str | None:
    """Given 16 bytes, return the canonical text, or None if they are all zero."""
    # An inventory asks for tens of thousands of them: uuid.UUID takes eight times as long.
    if raw == _UNSET:
        return None
    text = raw.hex()
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def read_only(info: SubvolumeInfo) -> bool:
    """Return whether the subvolume itself is read-only (not: mounted so)."""
    return bool(info.flags & _READ_ONLY)


def volume_id(info: SubvolumeInfo, fs_uuid: str) -> str | None:
    """Return what identifies a subvolume as an origin: its UUID.

    The top-level subvolume of a file system made before 2018 (btrfs-progs 4.16) has none: "<file system UUID>:5" then.
    """
    return uuid_text(info.uuid) or (f"{fs_uuid}:{TOP_LEVEL_ID}" if info.id == TOP_LEVEL_ID else None)
