"""Chooses the folders of a prepare: where it works and where its result goes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from snapmgr.contract.errors import ConfigError, MissingRequirementError, StorageError
from snapmgr.system.blockdev import MountTree, read_mounts
from snapmgr.system.mount import require_own
from snapmgr.system.paths import lies_in, shown

if TYPE_CHECKING:
    from snapmgr.physical.prepare.choice import ResultPlace

_IN_MEMORY = frozenset({"tmpfs", "ramfs"})


class PreparePlaces(Struct, frozen=True, kw_only=True):
    """The folders that a prepare needs."""

    result: ResultPlace | None
    """Where the result must be; None: either place is fine."""
    beside: str
    """Folder in the storage that gets a result there."""
    storage_target: str
    scratch: str
    """Folder on scratch that gets a result there."""
    scratch_target: str


def choose_places(
    source: str,
    *,
    target: str | None,
    beside: str | None,
    result: ResultPlace | None,
    scratch: str,
    make: bool,
    name: str | None = None,
) -> PreparePlaces:
    """Return where to work, given the fields of `prepare.order.PrepareOrder`; `make` creates the scratch folder.

    A target on the backup's file system is in the storage. Raises ConfigError if the target exists or does not fit the
    wanted result.
    """
    real = os.path.realpath(source)
    beside = os.path.realpath(beside) if beside is not None else os.path.dirname(real)
    name = name or os.path.basename(real) or "backup"
    found = PreparePlaces(
        result=result,
        beside=beside,
        storage_target=_fresh(os.path.join(beside, f"{name}.prepared")),
        scratch=os.path.realpath(scratch),
        scratch_target=_fresh(os.path.join(os.path.realpath(scratch), f"{name}.prepared")),
    )
    if target is None:
        _check_scratch(scratch, make=make)
        return found
    parent, last = os.path.split(os.path.abspath(target))
    parent = os.path.realpath(parent)
    where = os.path.join(parent, last)
    _check_target(where, parent, real)
    there = _same_file_system(parent, beside)
    if result is not None and (result == "storage") != there:
        raise ConfigError(
            f"{shown(where)} is {'' if there else 'not '}in the storage of {shown(source)}, but the result must be "
            f"{'on scratch' if result == 'scratch' else 'in the storage'}",
            hint="name another folder, or leave --result out",
        )
    if not there:
        return replace(found, result="scratch", scratch=parent, scratch_target=where)
    _check_scratch(scratch, make=make)
    return replace(found, result="storage", beside=parent, storage_target=where)


def _check_target(where: str, parent: str, source: str) -> None:
    if not os.path.isdir(parent):
        raise ConfigError(f"{shown(parent)} is not an existing folder", hint=f"make it first: mkdir -p {shown(parent)}")
    if os.path.lexists(where):
        raise ConfigError(
            f"{shown(where)} exists", hint="prepare overwrites nothing: name a folder that does not exist yet"
        )
    if lies_in(where, source):
        raise ConfigError(f"{shown(where)} lies in the backup", hint="name a folder outside of it")


def _fresh(path: str) -> str:
    number, found = 1, path
    while os.path.lexists(found):
        number += 1
        found = f"{path}-{number}"
    return found


def _check_scratch(scratch: str, *, make: bool) -> None:
    require_own(Path(scratch))
    if not make:
        return
    try:
        os.makedirs(scratch, mode=0o755, exist_ok=True)
    except OSError as error:
        raise MissingRequirementError(
            f"cannot make the scratch folder {shown(scratch)}: {error.strerror}", hint="name another one (--scratch)"
        ) from None


def _same_file_system(left: str, right: str) -> bool:
    if os.stat(left).st_dev == os.stat(right).st_dev:
        return True
    # Each btrfs subvolume has a device number of its own; the mount's is one.
    tree = MountTree(read_mounts())
    one, other = tree.find(left), tree.find(right)
    return one.fs_type == other.fs_type and one.source == other.source and one.fs_type == "btrfs"


def free_bytes(folder: str) -> int:
    """Return the free space of a folder's file system; if it is in memory, at most half of the free memory."""
    while not os.path.lexists(folder):  # before it is made
        folder = os.path.dirname(folder)
    try:
        room = os.statvfs(folder)
    except OSError as error:
        raise StorageError(f"cannot read the free space of {shown(folder)}: {error.strerror}") from None
    free = (room.f_bfree if os.geteuid() == 0 else room.f_bavail) * room.f_frsize
    in_memory = MountTree(read_mounts()).find(os.path.realpath(folder)).fs_type in _IN_MEMORY
    return min(free, memory_available() // 2) if in_memory else free


def memory_available() -> int:
    """Return the memory that programs can still take (MemAvailable of proc_meminfo(5))."""
    with open("/proc/meminfo", encoding="ascii") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return 0
