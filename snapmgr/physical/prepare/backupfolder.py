"""Reads the folder of a finished backup, and refuses one that cannot be prepared; changes nothing."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from msgspec import Struct

from snapmgr.contract.errors import ConfigError, InUseError, MissingRequirementError
from snapmgr.mysql.connect.identity import process_name, server_processes
from snapmgr.physical.prepare.ownership import stamps
from snapmgr.physical.tools.choose import tool_for
from snapmgr.physical.tools.infofile import read_info
from snapmgr.system.paths import lies_in, shown

if TYPE_CHECKING:
    from snapmgr.physical.tools.request import BackupInfo

_REDO = ("ib_logfile0", "xtrabackup_logfile")


class BackupFolder(Struct, frozen=True, kw_only=True):
    """A backup that can be prepared."""

    info: BackupInfo
    stamps: dict[str, tuple[int, int]]
    """Size and modification time of each file, by its path in it."""

    @property
    def sizes(self) -> dict[str, int]:
        """Size of all files together."""
        return {path: size for path, (size, _) in self.stamps.items()}

    @property
    def redo_bytes(self) -> int:
        """Size of the redo log that the prepare applies."""
        return sum(self.stamps[name][0] for name in _REDO if name in self.stamps)


def inspect(folder: str, *, program: str | None = None) -> BackupFolder:
    """Read a backup folder. Raises ConfigError, InUseError or MissingRequirementError if it cannot be prepared."""
    if not os.path.isdir(folder):
        raise ConfigError(
            f"{shown(folder)} is not a folder", hint="name the folder of a finished backup, or a snapshot"
        )
    info = read_info(folder)
    if info.is_increment:
        raise ConfigError(
            f"{shown(folder)} is an increment (from LSN {info.from_lsn} on), not a whole backup",
            hint="apply it to its full backup with the tool, or let an incremental job do that",
        )
    if info.state == "prepared":
        raise ConfigError(
            f"{shown(folder)} is prepared already: start a server on it, or better on a copy",
            hint=f"cp -a --reflink=auto {shown(folder)} DIR",
        )
    _refuse_used(folder)
    missing = tool_for(info, program=program).missing()
    if missing:
        raise MissingRequirementError(
            f"{info.tool} cannot prepare {shown(folder)}: {'; '.join(one.what for one in missing)}",
            hint="; ".join(one.hint for one in missing),
        )
    try:
        return BackupFolder(info=info, stamps=stamps(folder))
    except OSError as error:
        raise MissingRequirementError(
            f"cannot read {shown(folder)}: {error.strerror}", hint="run as root, or as the backup's owner"
        ) from None


def _refuse_used(folder: str) -> None:
    """Raise InUseError if a server runs on the folder."""
    real = os.path.realpath(folder)
    for process in server_processes():
        with suppress(OSError):
            # The working directory of a server is its datadir.
            used = [os.readlink(process / "cwd"), *_open_files(process)]
            if any(lies_in(path, real) for path in used):
                raise InUseError(
                    f"{process_name(int(process.name))} (pid {process.name}) runs on {shown(folder)}",
                    hint="a server changes its datadir: prepare another backup",
                )


def _open_files(process: os.PathLike[str]) -> list[str]:
    found = []
    folder = os.path.join(process, "fd")
    for number in os.listdir(folder):
        with suppress(OSError):
            found.append(os.readlink(os.path.join(folder, number)))
    return found
