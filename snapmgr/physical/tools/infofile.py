"""Reads the tools' info files about a backup, strictly: a damaged, empty or foreign file is an error.

mariadb-backup 11.1 renamed its files (MDEV-18931): xtrabackup_checkpoints became mariadb_backup_checkpoints, and so on.
Formats: the manuals of mariadb-backup and XtraBackup, and of 10.11.19, 11.8.6 and MySQL 9.7 (tests/golden/physical).
"""

from __future__ import annotations

import os
import re
from typing import Literal, get_args

from msgspec import Struct

from snapmgr.catalog.manifest import Position
from snapmgr.catalog.physical import State
from snapmgr.contract.errors import MissingRequirementError, NotFoundError, StorageError
from snapmgr.mysql.datadir.origin import read_origin
from snapmgr.mysql.datadir.plainfile import open_plain
from snapmgr.physical.tools.request import BackupInfo

BackupType = Literal["full-backuped", "incremental", "log-applied", "full-prepared"]
_PREFIXES = ("mariadb_backup_", "xtrabackup_")
_MAX_BYTES = 4 << 20
_LSN_LIMIT = 1 << 64
_LSN = re.compile(r"(?P<name>from_lsn|to_lsn|last_lsn) = (?P<value>[0-9]{1,20})")
_GTID = re.compile(r"[0-9A-Za-z_:,-]*")
_BINLOG = re.compile(r"(?P<file>[^\t\n\0/]+)\t(?P<offset>[0-9]{1,20})(?:\t(?P<gtid>[^\t\n]*))?")
_SLAVE_GTID = re.compile(r"^SET GLOBAL gtid_slave_pos *= *'(?P<gtid>[0-9,-]*)'", re.MULTILINE | re.IGNORECASE)
_SLAVE_FILE = re.compile(
    r"^CHANGE (?:MASTER|REPLICATION SOURCE)(?: '(?P<name>[^'\n]*)')? TO (?:MASTER|SOURCE)_LOG_FILE="
    r"'(?P<file>[^'\n]*)', *"
    r"(?:MASTER|SOURCE)_LOG_POS=(?P<offset>[0-9]{1,20})",
    re.MULTILINE | re.IGNORECASE,
)
_CLONE = "#clone"
_CLONE_SUCCEEDED = "2"
"""clone_status.STATE "Completed" in the plugin's file: observed with 9.7."""
_MARIADB = "mariadb"


class Checkpoints(Struct, frozen=True, kw_only=True):
    """xtrabackup_checkpoints."""

    backup_type: BackupType
    from_lsn: int
    to_lsn: int
    last_lsn: int


def parse_checkpoints(text: str, where: str) -> Checkpoints:
    """Parse the file's text. Raises StorageError that names `where` if it is damaged."""
    lines = text.splitlines()
    kinds = [line.removeprefix("backup_type = ") for line in lines if line.startswith("backup_type = ")]
    found = [match for line in lines if (match := _LSN.fullmatch(line))]
    numbers = {match["name"]: int(match["value"]) for match in found}
    if len(kinds) != 1 or kinds[0] not in get_args(BackupType) or len(found) != len(numbers):
        raise _damaged(where, f"its backup_type is {', '.join(kinds) or 'missing'}"[:200])
    missing = {"from_lsn", "to_lsn", "last_lsn"} - numbers.keys()
    if missing or max(numbers.values()) >= _LSN_LIMIT:
        raise _damaged(where, f"{', '.join(sorted(missing)) or 'an LSN'} is missing or not a number")
    kind: BackupType = next(one for one in get_args(BackupType) if one == kinds[0])
    if numbers["to_lsn"] < numbers["from_lsn"] or (kind != "incremental" and numbers["from_lsn"]):
        raise _damaged(where, f"its LSNs contradict each other ({numbers['from_lsn']} to {numbers['to_lsn']}, {kind})")
    return Checkpoints(
        backup_type=kind, from_lsn=numbers["from_lsn"], to_lsn=numbers["to_lsn"], last_lsn=numbers["last_lsn"]
    )


def parse_binlog_info(text: str, where: str) -> Position | None:
    """Parse xtrabackup_binlog_info's text and return the position; None for an empty file: no binary log.

    A line holds file, offset and perhaps GTIDs, separated by tabs; MySQL's GTIDs may continue on further lines. Of
    several files the last one counts. Raises StorageError if the text is damaged.
    """
    records: list[str] = []
    for line in text.splitlines():
        if "\t" in line:
            records.append(line)
        elif records:
            records[-1] += line.strip()
        elif line.strip():
            raise _damaged(where, "no line of file and offset")
    if not records:
        return None
    match = _BINLOG.fullmatch(records[-1])
    gtid = "".join((match["gtid"] or "").split()) if match else ""
    if match is None or int(match["offset"]) >= _LSN_LIMIT or not _GTID.fullmatch(gtid):
        raise _damaged(where, "it does not hold file, offset and GTID")
    return Position(file=match["file"], offset=int(match["offset"]), gtid=gtid)


def parse_info(text: str, where: str) -> dict[str, str]:
    """Parse xtrabackup_info's text and return its values by name. Raises StorageError for any other text."""
    values = {
        name: value.strip()
        for name, separator, value in (line.partition(" =") for line in text.splitlines())
        if separator and name.isidentifier()
    }
    if not {"tool_version", "server_version"} <= values.keys():
        raise _damaged(where, "tool_version or server_version is missing")
    return values


class SlaveInfo(Struct, frozen=True, kw_only=True):
    """xtrabackup_slave_info: the positions from which a replica continues to read its sources."""

    gtid: str
    """MariaDB's gtid_slave_pos; "" if it does not replicate by GTID."""
    files: dict[str, tuple[str, int]]
    """File and offset by the connection's name."""


def parse_slave_info(text: str, where: str) -> SlaveInfo:
    """Parse the file's statements. Raises StorageError if it recognises none of them."""
    gtid = _SLAVE_GTID.search(text)
    files = {
        (match["name"] or ""): (match["file"], int(match["offset"]))
        for match in _SLAVE_FILE.finditer(text)
        if match["file"] and int(match["offset"]) < _LSN_LIMIT
    }
    if gtid is None and not files and "CHANGE " not in text.upper():
        raise _damaged(where, "it names no position of a source")
    return SlaveInfo(gtid=gtid["gtid"] if gtid else "", files=files)


def read_slave_info(folder: str) -> SlaveInfo:
    """Return the recorded positions of a replica's sources; empty for other servers. Raises StorageError."""
    text = _read_either(folder, "slave_info")
    if text is None:
        return SlaveInfo(gtid="", files={})
    return parse_slave_info(text, f"{folder}: the tool's slave_info file")


def read_info(folder: str | os.PathLike[str]) -> BackupInfo:
    """Describe the finished backup in a folder by the tool's own files alone.

    Raises NotFoundError if the folder is missing, StorageError if it holds no finished backup, MissingRequirementError
    if it is compressed or partial.
    """
    folder = os.fspath(folder)
    if not os.path.isdir(folder):
        raise NotFoundError(f"{folder} does not exist")
    if os.path.lexists(os.path.join(folder, _CLONE)):
        return _clone_state(folder)
    checkpoints_text = _read_either(folder, "checkpoints")
    info_text = _read_either(folder, "info")
    if checkpoints_text is None and info_text is None:
        raise StorageError(
            f"{folder} is not a physical backup: it has no xtrabackup_checkpoints, no mariadb_backup_checkpoints "
            "and no status file of CLONE",
            hint="name the folder that mariadb-backup, xtrabackup or CLONE LOCAL DATA DIRECTORY has made",
        )
    # The tools write the info file last of all.
    if checkpoints_text is None or info_text is None:
        raise _unfinished(folder)
    info = parse_info(info_text, f"{folder}: the tool's info file")
    if info.get("partial", "N") != "N" or info.get("compressed", "N") != "N":
        partial = info.get("partial", "N") != "N"
        raise MissingRequirementError(
            f"{folder} is a {'partial' if partial else 'compressed'} backup, which is not supported",
            hint=None if partial else "decompress it first",
        )
    checkpoints = parse_checkpoints(checkpoints_text, f"{folder}: the tool's checkpoints file")
    binlog = _read_either(folder, "binlog_info")
    mariadb = _MARIADB in f"{info['server_version']} {info['tool_version']}".lower()
    return BackupInfo(
        tool="mariadb-backup" if mariadb else "xtrabackup",
        tool_version=info["tool_version"],
        flavor="mariadb" if mariadb else "mysql",
        server_version=info["server_version"],
        state=_state(checkpoints.backup_type, mariadb=mariadb),
        from_lsn=checkpoints.from_lsn,
        to_lsn=checkpoints.to_lsn,
        last_lsn=checkpoints.last_lsn,
        position=None if binlog is None else parse_binlog_info(binlog, f"{folder}: the tool's binlog_info file"),
    )


def _state(kind: BackupType, *, mariadb: bool) -> State:
    if kind in ("full-backuped", "incremental"):
        return "raw"
    # mariadb-backup never rolls back open transactions, so increments can always follow.
    return "prepared" if mariadb or kind == "full-prepared" else "redo-applied"


def _clone_state(folder: str) -> BackupInfo:
    status = (read_text(os.path.join(folder, _CLONE, "#view_status")) or "").split()
    if not status or os.path.lexists(os.path.join(folder, _CLONE, "#in_progress")):
        raise _unfinished(folder)
    if status[0] != _CLONE_SUCCEEDED:
        raise StorageError(f"{folder} is a failed clone, by the server's status file in it", hint="clone again")
    origin = read_origin(folder)
    if not origin.version:
        raise StorageError(f"{folder} is an incomplete clone: its data dictionary (mysql.ibd) has no version")
    return BackupInfo(
        tool="clone",
        tool_version=origin.version,
        flavor="mysql",
        server_version=origin.version,
        state="prepared",
        from_lsn=0,
        to_lsn=0,
        last_lsn=0,
        position=None,
    )


def _read_either(folder: str, name: str) -> str | None:
    """Return the text of one of the tool's files, by its newer or its older name; None if neither exists."""
    found = [text for prefix in _PREFIXES if (text := read_text(os.path.join(folder, prefix + name))) is not None]
    if len(found) > 1:
        raise _damaged(os.path.join(folder, _PREFIXES[0] + name), f"{_PREFIXES[1]}{name} is there as well")
    return found[0] if found else None


def read_text(path: str) -> str | None:
    """Return the text of one of the tool's files; None if it does not exist. Raises StorageError if it is not text."""
    try:
        with open_plain(path) as file:
            data = file.read(_MAX_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from None
    try:
        if len(data) <= _MAX_BYTES and b"\0" not in data:
            return data.decode()
    except UnicodeDecodeError:
        pass
    raise _damaged(path, "it is not text")


def _unfinished(folder: str) -> StorageError:
    return StorageError(f"the backup in {folder} was never finished", hint="remove it, and back up again")


def _damaged(where: str, why: str) -> StorageError:
    return StorageError(f"{where} is damaged: {why}", hint="another backup is needed")
