"""Computes the options for a server on a moved datadir, and finds absolute paths that still lead to the old place.

A server that knows only its new datadir may open the *live* redo log, binary log or tablespaces, wherever its
configuration or the data name them by absolute paths.
"""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING

from snapmgr.mysql.datadir.copy import narrow_folders
from snapmgr.mysql.datadir.origin import version_number
from snapmgr.mysql.datadir.settings import PATH_SETTINGS
from snapmgr.system.paths import lies_in

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from snapmgr.catalog.manifest import ServerRecord

# Without these, or with other values, the server refuses the files or reads them differently.
_FORMAT_SETTINGS = ("innodb_page_size", "innodb_undo_tablespaces", "lower_case_table_names", "aria_block_size")
# Without these a server refuses MySQL's binary logs; the default differs between series.
_MYSQL_SETTINGS = ("enforce_gtid_consistency", "gtid_mode")
_OPTIONS = {"log_bin_basename": "log-bin", "relay_log_basename": "relay-log"}
_LOGS = ("log_bin_", "relay_log_")
# Settings that MySQL has as variables but not, or no longer, as options.
_NO_OPTIONS = {"mysql": ("relay_log_info_file",)}
_REPLICA_SINCE = (8, 0, 26)
_DATA_FILE = re.compile(r"(?P<space>\s*)(?P<path>/.+?)(?P<size>:\d)")
_ISL_BYTES = 4096
LISTS = {
    "log_bin_index": "log_bin_basename",
    "relay_log_index": "relay_log_basename",
    "relay_log_info_file": "relay_log_basename",
}
"""Settings whose files name logs, perhaps by absolute paths, and the setting that names the logs' own folder."""


def relocated_options(
    server: ServerRecord,
    moved: Callable[[str], str],
    *,
    places: Collection[str] = (),
    absent: Collection[str] = (),
) -> tuple[str, ...]:
    """Return the options for a server on the relocated files; they name every path that the source had set.

    Args:
        server: the source's.
        moved: given an absolute path of the source, returns its present path (the same one if it was not moved).
        places: folders of the source that are among the files, by their paths on the source.
        absent: folders of logs that are not among the files: new logs begin in the datadir, not in the live folders.
    """
    datadir = moved(server.datadir)
    options = [f"--datadir={datadir}"]
    for name in PATH_SETTINGS:
        if name in server.settings and name not in _NO_OPTIONS.get(server.flavor, ()):
            option = _OPTIONS.get(name, name.replace("_", "-"))
            path = os.path.normpath(os.path.join(server.datadir, server.settings[name]))
            if name.startswith(_LOGS) and os.path.dirname(path) in absent:
                options.append(f"--{option}={os.path.join(datadir, os.path.basename(path))}")
            else:
                options.append(f"--{option}={moved(path)}")
    files = server.settings.get("innodb_data_file_path")
    if files:
        options.append(f"--innodb-data-file-path={_move_files(files, moved)}")
    if folders := narrow_folders(server.settings.get("innodb_directories", ""), (server.datadir, *places)):
        options.append(f"--innodb-directories={_move_folders(folders, moved)}")
    kept = (*_FORMAT_SETTINGS, *(_MYSQL_SETTINGS if server.flavor == "mysql" else ()))
    options += [f"--{name.replace('_', '-')}={server.settings[name]}" for name in kept if name in server.settings]
    # A replica's copy has its server_id: if it connected to the source, it would disconnect the live replica.
    modern = server.flavor == "mysql" and version_number(server.version) >= _REPLICA_SINCE
    return (*options, "--skip-replica-start" if modern else "--skip-slave-start")


def _move_folders(folders: str, moved: Callable[[str], str]) -> str:
    return ";".join(moved(folder) if folder.startswith("/") else folder for folder in folders.split(";"))


def _move_files(data_file_path: str, moved: Callable[[str], str]) -> str:
    parts = data_file_path.split(";")
    return ";".join(
        _DATA_FILE.sub(lambda match: match["space"] + moved(match["path"]) + match["size"], part, count=1)
        if part.lstrip().startswith("/")
        else part
        for part in parts
    )


def absolute_names(datadir_fd: int) -> Iterator[tuple[str, str]]:
    """Yield (file, path) for every absolute path in the .isl files of the open datadir."""
    for folder in (".", *_folders(datadir_fd)):
        folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=datadir_fd)
        try:
            for name in sorted(os.listdir(folder_fd)):
                if name.endswith(".isl"):
                    for line in _lines(name, folder_fd, _ISL_BYTES)[:1]:
                        if line.startswith("/"):
                            yield os.path.normpath(os.path.join(folder, name)), line
        finally:
            os.close(folder_fd)


def absolute_folders(name: str, folder_fd: int) -> list[str]:
    """Return the folders of all absolute paths in a file of an open folder, such as the index of the binary logs."""
    return sorted({os.path.dirname(line) for line in _lines(name, folder_fd, None) if line.startswith("/")})


def seen_from(datadir: str, folder: str) -> str:
    """Return how a list of logs names a folder: relative to the datadir if it is in it, as "." or "./sub". Pure."""
    return f"./{os.path.relpath(folder, datadir)}".removesuffix("/.") if lies_in(folder, datadir) else folder


def name_own_logs(name: str, folder_fd: int, logs: str, present: Collection[str]) -> bool:
    """In a list of logs in an open folder, change absolute paths so that they name the logs of a copy.

    Args:
        name: the list, an index or relay-log.info; nothing happens if it is missing or a symlink.
        folder_fd: its folder.
        logs: the folder of the copy's logs, as `seen_from`.
        present: names of the files there. A path whose file is not there stays.

    Return whether anything was changed.
    """
    try:
        # Never through a symlink, which may lead to the live list.
        if not stat.S_ISREG(os.stat(name, dir_fd=folder_fd, follow_symlinks=False).st_mode):
            return False
        fd = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
    except FileNotFoundError:
        return False
    with os.fdopen(fd, "r+b") as file:
        lines = file.read().split(b"\n")
        changed = [
            os.fsencode(os.path.join(logs, base))
            if line.startswith(b"/") and (base := os.fsdecode(os.path.basename(line))) in present
            else line
            for line in lines
        ]
        if changed != lines:
            file.seek(0)
            file.write(b"\n".join(changed))
            file.truncate()
    return changed != lines


def _folders(datadir_fd: int) -> list[str]:
    with os.scandir(datadir_fd) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))


def _lines(name: str, folder_fd: int, limit: int | None) -> list[str]:
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
    except FileNotFoundError:
        return []
    with os.fdopen(fd, encoding="utf-8", errors="surrogateescape") as file:
        return [line.strip() for line in file.read(limit).splitlines() if line.strip()]
