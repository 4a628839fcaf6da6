"""Finds all files that a server writes: a snapshot must hold them in the same instant as the datadir.

It uses four sources, because none is complete: the server's variables; InnoDB's own list of tablespaces (on MariaDB
only those opened since its start); the datadir itself, two levels deep, where DATA DIRECTORY leaves symlinks and .isl
files; and the files that the process has open, for those that no variable names (`snapmgr.mysql.connect.openfiles`).
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from snapmgr.mysql.connect.abilities import is_on
from snapmgr.mysql.connect.openfiles import kind_of, open_files
from snapmgr.mysql.datadir.engines import ENGINE_FILES, SYSTEM_SCHEMAS, count_tables
from snapmgr.mysql.datadir.plainfile import read_isl
from snapmgr.mysql.datadir.settings import PATH_SETTINGS, SETTINGS, key_settings, plugin_settings, source_settings
from snapmgr.system.blockdev import read_mounts
from snapmgr.system.paths import lies_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from snapmgr.mysql.connect.client import Connection
    from snapmgr.mysql.connect.identity import ServerIdentity

# Folders; relative ones start at the datadir. Empty: the datadir.
_FOLDERS = {
    "innodb_data_home_dir": "system tablespace",
    "innodb_log_group_home_dir": "redo log",
    "innodb_undo_directory": "undo tablespaces",
    "innodb_doublewrite_dir": "doublewrite buffer",
    "aria_log_dir_path": "Aria log",
    "rocksdb_datadir": "RocksDB",
    "rocksdb_wal_dir": "RocksDB's log",
}
# Files, or prefixes of files: their folder is the place.
_FILES = {
    "innodb_doublewrite_file": "doublewrite buffer",
    "log_bin_basename": "binary log",
    "log_bin_index": "index of the binary log",
    "relay_log_basename": "relay log",
    "relay_log_index": "index of the relay log",
    "relay_log_info_file": "replication state",
}
# After a lock and a flush of the engines' logs, the data are consistent without these files. A lock excludes DDL that
# would need recovery.
_LOGS = frozenset(
    {
        *("binary log", "index of the binary log", "relay log", "index of the relay log"),
        *("replication state", "DDL recovery log"),
    }
)
# Folders of files that a server creates anew at its start; tmpdir may name several.
_SCRATCH = ("tmpdir", "innodb_tmpdir", "slave_load_tmpdir", "replica_load_tmpdir", "innodb_temp_tablespaces_dir")
_TEMPORARY_FILES = "innodb_temp_data_file_path"
# Files for people, not data.
_MESSAGE_FILES = ("log_error", "general_log_file", "slow_query_log_file", "log_slow_query_file", "pid_file")
LAYOUT = tuple(
    sorted({*_FOLDERS, *_FILES, *SETTINGS, *PATH_SETTINGS, *_SCRATCH, *_MESSAGE_FILES, _TEMPORARY_FILES, "log_bin"})
)
"""Variables that tell where a server writes, and what a server on a copy needs."""
# Tables of InnoDB's tablespaces by age: MySQL 8, MariaDB, MySQL 5.7 and old MariaDB. All have SPACE, a number.
_TABLESPACE_TABLES = (
    ("INNODB_DATAFILES", "PATH"),
    ("INNODB_SYS_TABLESPACES", "FILENAME"),
    ("INNODB_SYS_DATAFILES", "PATH"),
)
# The system tablespace, whose paths are relative to its own folder, and the temporary one, which nobody needs.
_NOT_LISTED = "(0, 4294967293, 4294967294)"
_PARTITION = r"(?i)#p#.*"
_DATA_FILE = r"\s*(?P<path>.+?):\d"


class DataPlace(Struct, frozen=True, kw_only=True):
    """A file or folder that the server writes to."""

    what: str
    path: str
    """Absolute, symlinks resolved."""
    log: bool = False
    """Whether it holds only binary or relay logs."""

    @property
    def folder(self) -> str:
        """The folder that a snapshot must hold for this place to be in it: its own path, or that of a file's parent."""
        return self.path if os.path.isdir(self.path) else os.path.dirname(self.path)


class ServerLayout(Struct, frozen=True, kw_only=True):
    """All files that a server writes and that a snapshot must hold."""

    datadir: str
    places: tuple[DataPlace, ...]
    """Those outside the datadir, or below it on another file system or subvolume; sorted by path."""
    log_bin_basename: str | None
    """Folder and base name of the binary logs; None without binary log."""
    settings: dict[str, str]
    """The settings that a server on a copy needs (`snapmgr.mysql.datadir.settings`); paths start at the datadir."""
    engines: dict[str, int]
    """Number of tables by engine, system schemas excluded. Where the account may not see tables, MyISAM, Aria, CSV and
    ARCHIVE are counted by their files, and other engines that may have tables get 0."""
    scratch: tuple[str, ...] = ()
    """File systems mounted in the datadir that hold only temporary files."""
    unknown_files: tuple[str, ...] = ()
    """Files of unknown kind outside the datadir that the server has open for writing."""

    def folders(self) -> set[str]:
        """Return the folders of all places."""
        return {place.folder for place in self.places}


def read_layout(
    connection: Connection, identity: ServerIdentity, variables: Mapping[str, str] | None = None
) -> ServerLayout:
    """Ask the server, and read its datadir, for all files that it writes. Changes and locks nothing.

    `variables` holds at least LAYOUT, just read on this connection; without it, this reads them.

    Raises MysqlError, with error 1227 if the account does not have PROCESS.
    """
    values = connection.variables(*LAYOUT) if variables is None else variables
    layout = read_places(connection, identity, values)
    return replace(
        layout,
        settings=layout.settings | key_settings(connection, identity.flavor) | plugin_settings(connection),
        engines=count_tables(connection, layout.engines),
    )


def read_places(connection: Connection, identity: ServerIdentity, variables: Mapping[str, str]) -> ServerLayout:
    """Return the layout without the settings of keys and plugins, and with the engines that the files show.

    The arguments are those of `read_layout`, and so are the errors.
    """
    datadir = identity.datadir
    values = dict(variables)
    logs = values.get("log_bin_basename") if is_on(values.get("log_bin")) else None
    if logs is None:
        values.pop("log_bin_basename", None)
        values.pop("log_bin_index", None)
    scan = _Scan(datadir)
    named = list(_named_places(values, datadir))
    scratch = _scratch(values, datadir, named)
    found = [*named, *_beside(named, datadir), *_tablespaces(connection, datadir), *scan.places]
    foreign = tuple(folder for folder in scan.foreign if not lies_in(folder, *scratch))
    places = gather(found, datadir, foreign)
    opened, unknown = _opened(identity.pid, datadir, places, values)
    return ServerLayout(
        datadir=datadir,
        places=gather([*found, *opened], datadir, foreign) if opened else places,
        scratch=scratch,
        unknown_files=unknown,
        log_bin_basename=os.path.normpath(os.path.join(datadir, logs)) if logs else None,
        settings=source_settings(values, datadir),
        engines=scan.counts(),
    )


def read_files(datadir: str) -> ServerLayout:
    """Return the layout that the files of a datadir (resolved) show; its server need not run.

    They show where DATA DIRECTORY and symlinks lead and which folders are on another file system, but no settings.
    """
    scan = _Scan(datadir)
    return ServerLayout(
        datadir=datadir,
        places=gather(scan.places, datadir, scan.foreign),
        log_bin_basename=None,
        settings={},
        engines=scan.counts(),
    )


def gather(found: list[DataPlace], datadir: str, foreign: tuple[str, ...] = ()) -> tuple[DataPlace, ...]:
    """Return `found` without paths in the datadir: resolved, sorted, one place for each path.

    Args:
        found: places as named; may contain symlinks.
        datadir: resolved.
        foreign: folders in the datadir that are on another file system or subvolume; each becomes a place.
    """
    whats: dict[str, list[str]] = {folder: ["folder on another file system or subvolume"] for folder in foreign}
    for place in found:
        path = os.path.realpath(place.path)
        if not lies_in(path, datadir):
            whats.setdefault(path, [])
            if place.what not in whats[path]:
                whats[path].append(place.what)
    return tuple(
        DataPlace(what=", ".join(names), path=path, log=_LOGS.issuperset(names))
        for path, names in sorted(whats.items())
    )


def data_files(data_file_path: str) -> tuple[str, ...]:
    """Given innodb_data_file_path ("ibdata1:12M;/b/ibdata2:1G:autoextend"), return its paths."""
    parts = (re.match(_DATA_FILE, part) for part in data_file_path.split(";"))
    return tuple(match["path"] for match in parts if match)


def _named_places(values: dict[str, str], datadir: str) -> Iterator[DataPlace]:
    for name, what in _FOLDERS.items():
        if values.get(name):
            yield DataPlace(what=what, path=os.path.join(datadir, values[name]))
    for name, what in _FILES.items():
        if values.get(name):
            path = os.path.join(datadir, values[name])
            # The file itself may be a symlink.
            yield DataPlace(what=what, path=os.path.dirname(os.path.realpath(path)))
    home = os.path.join(datadir, values.get("innodb_data_home_dir", ""))
    for name in data_files(values.get("innodb_data_file_path", "")):
        # MariaDB prepends innodb_data_home_dir even to an absolute path.
        inside = os.path.join(home, name.lstrip("/"))
        yield DataPlace(what="system tablespace", path=inside if os.path.exists(inside) else os.path.join(home, name))


def _beside(named: list[DataPlace], datadir: str) -> Iterator[DataPlace]:
    """Yield entries of named folders outside the datadir that lead elsewhere (#innodb_redo, a log that was moved)."""
    whats: dict[str, str] = {}
    for place in named:
        folder = os.path.realpath(place.path)
        if not lies_in(folder, datadir) and os.path.isdir(folder):
            whats.setdefault(folder, place.what)
    for folder, what in whats.items():
        device = os.stat(folder).st_dev
        for entry in _entries(folder):
            # Such folders may hold unrelated files: consider only names of InnoDB's files and of logs.
            if kind_of(entry.name) and (entry.is_symlink() or _device(entry, device) != device):
                yield DataPlace(what=what, path=entry.path)


def _scratch(values: dict[str, str], datadir: str, named: list[DataPlace]) -> tuple[str, ...]:
    """Return the file systems mounted in the datadir that hold only temporary files.

    In a snapshot their folders are empty and usable. The folder of a nested subvolume would not be writable there.
    """
    needed = [os.path.realpath(place.path) for place in named]
    candidates = {folder for folder in _temporary(values, datadir) if lies_in(folder, datadir)} - {datadir}
    mounted = candidates & {mount.point for mount in read_mounts()} if candidates else set()
    return tuple(sorted(folder for folder in mounted if not any(lies_in(one, folder) for one in needed)))


def _temporary(values: dict[str, str], datadir: str) -> set[str]:
    named = (path for name in _SCRATCH for path in values.get(name, "").split(":"))
    return {os.path.realpath(os.path.join(datadir, path)) for path in named if path}


def _opened(
    pid: int, datadir: str, places: tuple[DataPlace, ...], values: dict[str, str]
) -> tuple[list[DataPlace], tuple[str, ...]]:
    """Return the files that the process has open elsewhere: data, and files of unknown kind."""
    home = os.path.join(datadir, values.get("innodb_data_home_dir", ""))
    known = {datadir, *_temporary(values, datadir)}
    known |= {os.path.realpath(os.path.join(home, name)) for name in data_files(values.get(_TEMPORARY_FILES, ""))}
    known |= {place.path for place in places}
    known |= {os.path.realpath(os.path.join(datadir, values[name])) for name in _MESSAGE_FILES if values.get(name)}
    found, unknown = open_files(pid, known)
    return [DataPlace(what=what, path=path) for path, what in found.items()], unknown


def _tablespaces(connection: Connection, datadir: str) -> Iterator[DataPlace]:
    known = {
        (str(row["t"]).upper(), str(row["c"]).upper())
        for row in connection.rows(
            "SELECT TABLE_NAME AS t, COLUMN_NAME AS c FROM information_schema.COLUMNS "
            "WHERE TABLE_SCHEMA = 'information_schema' AND TABLE_NAME IN %s AND COLUMN_NAME IN %s",
            tuple(zip(*_TABLESPACE_TABLES, strict=True)),
        )
    }
    for table, column in _TABLESPACE_TABLES:
        if (table, column) in known:
            # Select only those elsewhere: there may be 100,000.
            rows = connection.rows(
                f"SELECT {column} AS path FROM information_schema.{table} "  # noqa: S608 - our own words
                f"WHERE ({column} LIKE '/%' OR {column} LIKE '../%') AND SPACE NOT IN {_NOT_LISTED}"
            )
            for row in rows:
                yield DataPlace(what="tablespace", path=os.path.join(datadir, str(row["path"])))


class _Scan:
    """A scan of the datadir and its folders: symlinks, .isl files, foreign folders, files by engine."""

    def __init__(self, datadir: str) -> None:
        self.places: list[DataPlace] = []
        self.foreign: tuple[str, ...] = ()
        self.engine_files: dict[str, set[str]] = {}
        device = os.stat(datadir).st_dev
        for entry in _entries(datadir):
            self._look(entry)
            if entry.is_dir():
                # A symlink is a place in any case; a folder on another device is a mount or a nested subvolume.
                home = _device(entry, device)
                if not entry.is_symlink() and home != device:
                    self.foreign += (entry.path,)
                for inner in _entries(entry.path):
                    self._look(inner)
                    self._count(entry.name, inner.name)
                    if inner.is_dir(follow_symlinks=False) and _device(inner, home) != home:
                        self.foreign += (inner.path,)

    def counts(self) -> dict[str, int]:
        """Return the number of tables by engine, for engines whose files show their tables."""
        return {engine: len(tables) for engine, tables in sorted(self.engine_files.items())}

    def _look(self, entry: os.DirEntry[str]) -> None:
        if entry.is_symlink():
            self.places.append(DataPlace(what=f"target of the symlink {entry.path}", path=entry.path))
        elif entry.name.endswith(".isl"):
            target = read_isl(entry.path)
            if target:
                self.places.append(DataPlace(what="tablespace", path=os.path.join(entry.path, "..", target)))

    def _count(self, schema: str, name: str) -> None:
        stem, extension = os.path.splitext(name)
        if extension in ENGINE_FILES and schema not in SYSTEM_SCHEMAS:
            tables = self.engine_files.setdefault(ENGINE_FILES[extension], set())
            tables.add(f"{schema}/{re.sub(_PARTITION, '', stem)}")


def _device(entry: os.DirEntry[str], if_gone: int) -> int:
    try:
        return entry.stat().st_dev
    except FileNotFoundError:
        return if_gone


def _entries(folder: str) -> list[os.DirEntry[str]]:
    # A schema may be dropped meanwhile; a lost+found is not the server's.
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, PermissionError):
        return []
