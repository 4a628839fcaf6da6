"""Checks that the state directory can be trusted: no others write to it, no mount hides it, it is this machine's."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from snapmgr.contract.errors import CatalogError, MissingRequirementError
from snapmgr.system.boot import lasting_machine_id
from snapmgr.system.trust import changeable, exchangeable

if TYPE_CHECKING:
    from pathlib import Path

MACHINE = "machine"
_FOLDERS = frozenset(
    {"snapshots", "leases", "schedules", "restores", "inplace", "locks", "frozen", "appliers", "capacity", "tool-logs"}
)
_MACHINE_BYTES = 4096


def require_sound(path: Path) -> None:
    """Raise CatalogError if the state directory cannot be trusted, MissingRequirementError without the right to it.

    A missing one can be trusted. Checked are the directory, the folders in it, the folders above it, and the machine
    that it belongs to.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise MissingRequirementError(f"cannot read the state directory {path}: {error.strerror}") from None
    if not stat.S_ISDIR(status.st_mode):
        raise CatalogError(f"the state directory {path} is not a directory", hint="see state_dir in the configuration")
    _refuse_changeable(path, status)
    way = exchangeable(path)
    if way is not None:
        raise CatalogError(
            f"others could replace the state directory {path}: {way}",
            hint="set state_dir to a folder whose parents only root can modify, such as /var/lib/snapmgr",
        )
    with suppress(PermissionError):  # the first read reports it
        for name in sorted(os.listdir(path)):
            _require_sound_folder(path / name, status.st_dev)
    _refuse_other_machine(path)


def _require_sound_folder(folder: Path, device: int) -> None:
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(status.st_mode):
        raise CatalogError(
            f"{folder} in the state directory is a symlink", hint="make it a plain folder; or move all of state_dir"
        )
    if not stat.S_ISDIR(status.st_mode):
        if folder.name in _FOLDERS:
            raise CatalogError(
                f"the state directory is damaged: {folder} is not a folder",
                hint="move it away; then restore the folder from a backup, or rebuild it: snapmgr doctor --fix",
            )
        return
    _refuse_changeable(folder, status)
    if status.st_dev != device:
        raise CatalogError(
            f"something is mounted at {folder}: it hides part of the state directory",
            hint=f"umount {folder}; a separate file system must hold the whole state directory",
        )


def _refuse_changeable(folder: Path, status: os.stat_result) -> None:
    why = changeable(status)
    if why is not None:
        raise CatalogError(
            f"the state directory cannot be trusted: others could change {folder}: {why}",
            hint=f"chown {os.geteuid()} {folder} && chmod go-w {folder}",
        )


def _refuse_other_machine(path: Path) -> None:
    """Raise CatalogError for a state directory of another machine, whose active runs would look dead here."""
    owner, us = _read_machine(path), lasting_machine_id()
    if owner is None or us is None or owner[0] == us:
        return
    raise CatalogError(
        f"the state directory {path} belongs to another machine: {owner[1]} (machine id {owner[0]}; this one is "
        f"{os.uname().nodename}, {us})",
        hint="give each machine a state_dir of its own; if that machine is gone for good, or is this one with a new "
        f"machine id: rm {path / MACHINE}",
    )


def _read_machine(path: Path) -> tuple[str, str] | None:
    """Return id and host name of the state directory's machine; None if it has none yet."""
    try:
        fd = os.open(path / MACHINE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        text = os.read(fd, _MACHINE_BYTES).decode("utf-8", "replace") if stat.S_ISREG(os.fstat(fd).st_mode) else ""
    finally:
        os.close(fd)
    machine, _, host = text.strip().partition(" ")
    return (machine, host) if machine else None


def claim(path: Path) -> None:
    """Record this machine as the owner of the state directory, unless it has one. Raises OSError."""
    us = lasting_machine_id()
    if us is None or _read_machine(path) is not None:
        return
    fresh = path / f".{MACHINE}.{os.getpid()}"
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        with open(fd, "wb") as file:
            file.write(f"{us} {os.uname().nodename}\n".encode())
            file.flush()
            os.fsync(file.fileno())
        # Unlike a rename this does not replace the record of a machine that was faster.
        with suppress(FileExistsError):
            os.link(fresh, path / MACHINE)
    finally:
        with suppress(FileNotFoundError):
            fresh.unlink()
    _refuse_other_machine(path)
