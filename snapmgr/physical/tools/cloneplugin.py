"""Runs MySQL's own CLONE: the server copies its InnoDB data into a folder (CLONE LOCAL DATA DIRECTORY).

A clone cannot be incremental and needs no prepare: a server recovers it at its first start, and only then is the binlog
position known (`read_position`). Tables of other engines than InnoDB would be silently empty, so they are refused.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import asdict

from snapmgr.catalog.manifest import Position
from snapmgr.contract.errors import ConfigError, MissingRequirementError, NotQuiescedError, StorageError
from snapmgr.contract.records import Reason
from snapmgr.contract.units import format_duration
from snapmgr.mysql.connect.client import ConnectionLostError, MysqlError, connect
from snapmgr.mysql.datadir.engines import SYSTEM_SCHEMAS
from snapmgr.mysql.server.rundir import as_user
from snapmgr.physical.tools.infofile import parse_binlog_info, read_info, read_text
from snapmgr.physical.tools.request import ApplyRequest, BrokenChainError, CopyRequest, Progress, ToolBackup
from snapmgr.physical.tools.source import BackupSource, open_source
from snapmgr.physical.tools.stagefolder import measure, require_empty
from snapmgr.physical.tools.toolreason import explain, missing_privileges
from snapmgr.system.command import CommandRunner
from snapmgr.system.files import write_file

if TYPE_CHECKING:
    from snapmgr.catalog.physical import ToolName
    from snapmgr.mysql.connect.client import Connection

_POLL_S = 0.5
_INNER = "clone"
"""The target of the clone, in the staging folder: only the server may make it."""
_MARK = "#clone"
_RECOVERED = os.path.join(_MARK, "#status_recovery")
_RECOVERED_LINES = 4
_FOREVER_S = 7 * 86400.0
_SHOWN = 10
# Engines without data on disk.
_WITHOUT_DATA = ("MEMORY", "BLACKHOLE", "FEDERATED", "MRG_MYISAM", "PERFORMANCE_SCHEMA")
_KILL_LIMIT_S = 30.0


class CloneTool:
    """CLONE LOCAL DATA DIRECTORY; see `snapmgr.physical.tools.request.Tool`."""

    name: ToolName = "clone"
    increments = False

    def __init__(self, *, server_version: str = "") -> None:
        """Take the server's version, for messages."""
        self._server_version = server_version

    def missing(self) -> tuple[Reason, ...]:
        """Return nothing: the plugin belongs to the server, and `back_up` checks it."""
        return ()

    def back_up(self, request: CopyRequest) -> ToolBackup:
        """Have the server clone itself into the folder. The result's `position` is None: see `read_position`."""
        if request.from_lsn:
            raise BrokenChainError("MySQL's CLONE makes no increments", hint='back up in full (mode = "full")')
        if request.options or request.throttle:
            raise ConfigError(
                "CLONE LOCAL takes no options and no throttle",
                hint="remove them, or set clone_… variables in the server",
            )
        require_empty(request.folder)
        with open_source(request.credentials, request.identity, self.name) as source:
            _require_plugin(source)
            _require_innodb(source)
            _let_in(request, source)
            inner = os.path.join(request.folder, _INNER)
            log: list[str] = [f"CLONE LOCAL DATA DIRECTORY = '{inner}'", f"server: {self._server_version}"]
            try:
                _run(request, source, inner)
                # A table may have been added meanwhile.
                _require_innodb(source)
                log.append("completed")
            except BaseException as error:
                log.append(f"failed: {error}")
                raise
            finally:
                write_file(Path(request.log), ("\n".join(log) + "\n").encode("utf-8", "backslashreplace"))
            _lift(request.folder, inner)
        info = read_info(request.folder)
        size_bytes, files = measure(request.folder)
        return ToolBackup(**asdict(info), sources=(), size_bytes=size_bytes, files=files)

    def apply(self, request: ApplyRequest) -> None:
        """Raise an error: a clone needs no prepare."""
        if request.increment is not None:
            raise BrokenChainError("MySQL's CLONE makes no increments")
        raise MissingRequirementError(
            f"{request.folder} is a clone, which needs no prepare: a server can start on it",
            hint="verify it, or restore it, as it is",
        )


def read_position(folder: str, connection: Connection) -> Position | None:
    """Return a clone's position once a server has started on its copy in `folder`; None without a recorded position.

    It is exact: InnoDB stores the binlog position with each commit, and recovery records that of the last one. Raises
    StorageError if the record is damaged or the server on `connection` has another position.
    """
    path = os.path.join(folder, _RECOVERED)
    lines = (read_text(path) or "").splitlines()
    if len(lines) < _RECOVERED_LINES:
        return None
    file, offset = os.path.basename(lines[2].strip()), lines[3].strip()
    if not file:
        return None
    gtid = "".join("".join(lines[_RECOVERED_LINES:]).split())
    position = parse_binlog_info(f"{file}\t{offset}\t{gtid}", path)
    executed = "".join(str(connection.value("SELECT @@GLOBAL.gtid_executed") or "").split())
    if executed != gtid:
        raise StorageError(
            f"{path} has the GTIDs {gtid or 'none'}, but the server on the clone has {executed or 'none'}"
        )
    return position


def _require_plugin(source: BackupSource) -> None:
    state = source.connection.value("SELECT PLUGIN_STATUS FROM information_schema.PLUGINS WHERE PLUGIN_NAME = 'clone'")
    if state != "ACTIVE":
        raise MissingRequirementError(
            "the server's plugin for cloning is not " + ("installed" if state is None else f"active ({state})"),
            hint="INSTALL PLUGIN clone SONAME 'mysql_clone.so'; (or plugin-load-add=mysql_clone.so in the server's "
            "configuration)",
        )


def _require_innodb(source: BackupSource) -> None:
    """Raise NotQuiescedError for tables that a clone leaves out."""
    marks = ", ".join(["%s"] * (len(SYSTEM_SCHEMAS) + len(_WITHOUT_DATA)))
    schemas, engines = marks.split(", ")[: len(SYSTEM_SCHEMAS)], marks.split(", ")[len(SYSTEM_SCHEMAS) :]
    rows = source.connection.rows(
        "SELECT CONCAT(TABLE_SCHEMA, '.', TABLE_NAME, ' (', ENGINE, ')') AS one FROM information_schema.TABLES "  # noqa: S608 - marks
        f"WHERE TABLE_TYPE = 'BASE TABLE' AND ENGINE <> 'InnoDB' AND TABLE_SCHEMA NOT IN ({', '.join(schemas)}) "
        f"AND ENGINE NOT IN ({', '.join(engines)}) ORDER BY 1",
        (*SYSTEM_SCHEMAS, *_WITHOUT_DATA),
    )
    found = [str(row["one"]) for row in rows]
    # The account may not see all tables, but it sees their files.
    others = [] if found else [f"tables of {engine}" for engine in source.needs.other_engines]
    if not found and not others:
        return
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    raise NotQuiescedError(
        f"CLONE copies only InnoDB, but there are other tables: {', '.join(found[:_SHOWN] or others)}{more}",
        hint="ALTER TABLE … ENGINE = InnoDB, or use xtrabackup or a snapshot job (source = mysql)"
        + ("" if found else "; or grant the account SELECT ON *.*, if there are none"),
    )


def _let_in(request: CopyRequest, source: BackupSource) -> None:
    """Give the staging folder to the server's user, because the server makes a folder in it.

    Raises MissingRequirementError.
    """
    uid, gid = source.identity.uid, source.identity.gid
    info = os.stat(request.folder)
    if os.geteuid() == 0:
        os.chown(request.folder, uid, gid)
    elif info.st_uid != uid:
        raise MissingRequirementError(
            f"the server runs as user {uid}, which cannot write to {request.folder}", hint="run snapmgr as root"
        )
    try:
        theirs = os.stat(f"/proc/{source.identity.pid}/root{os.path.realpath(request.folder)}")
        seen = (theirs.st_dev, theirs.st_ino) == (info.st_dev, info.st_ino)
    except OSError:
        seen = False
    if not seen:
        raise MissingRequirementError(
            f"the server does not see {request.folder}: it has a mount namespace of its own",
            hint="a container, or systemd's PrivateTmp=, ProtectHome= or PrivateMounts=? Name another staging folder",
        )
    if CommandRunner().run([*as_user(uid, gid), "test", "-w", request.folder], ok=(0, 1)).returncode != 0:
        raise MissingRequirementError(
            f"the server's user ({uid}) cannot reach {request.folder}",
            hint="the user needs the right to enter the folders above it (chmod o+x); FUSE mounts need allow_other",
        )


def _run(request: CopyRequest, source: BackupSource, inner: str) -> None:
    """Run the statement on a connection of its own until it ends; kill it if we are interrupted."""
    deadline = time.monotonic() + (_FOREVER_S if request.time_limit_s is None else request.time_limit_s)
    failures: list[MysqlError] = []
    with connect(request.credentials) as busy:
        busy.set_read_timeout(_FOREVER_S)

        def clone() -> None:
            try:
                busy.execute("CLONE LOCAL DATA DIRECTORY = %s", (inner,))
            except MysqlError as error:
                failures.append(error)

        expected = source.data_bytes()
        thread = threading.Thread(target=clone, name="clone", daemon=True)
        thread.start()
        try:
            while thread.is_alive():
                thread.join(_POLL_S)
                request.progress(_progress(source, expected))
                if time.monotonic() > deadline:
                    limit = format_duration(request.time_limit_s or 0)
                    raise StorageError(f"CLONE did not finish within {limit}", hint="raise the time limit")
        finally:
            if thread.is_alive():
                _end(source, busy)
                thread.join(_KILL_LIMIT_S)
    if failures:
        raise _failure(failures[0], request, source)


def _end(source: BackupSource, busy: Connection) -> None:
    """Kill the statement in the server: it would not notice a closed connection before its next answer."""
    with suppress(MysqlError):
        source.connection.execute(f"KILL {busy.connection_id}")
    busy.drop()


def _progress(source: BackupSource, expected: int) -> Progress:
    done = 0
    with suppress(MysqlError):
        done = int(str(source.connection.value("SELECT SUM(DATA) FROM performance_schema.clone_progress") or 0))
    return Progress(phase="the server clones itself", done_bytes=done, expected_bytes=expected)


def _failure(error: MysqlError, request: CopyRequest, source: BackupSource) -> Exception:
    if missing_privileges([error.message]) or not isinstance(error, ConnectionLostError):
        return explain([error.message], 1, what="CLONE", log=request.log, account=source.account)
    return StorageError(
        f"CLONE failed: the connection to the server was lost ({error.message})",
        hint="did the server stop, or was the connection killed? See its error log",
    )


def _lift(folder: str, inner: str) -> None:
    """Move the clone up into the staging folder; the file that marks it as finished comes last."""
    try:
        for name in sorted(os.listdir(inner), key=lambda name: name == _MARK):
            os.rename(os.path.join(inner, name), os.path.join(folder, name))
        os.rmdir(inner)
    except OSError as error:
        raise StorageError(f"cannot move the clone from {inner} to {folder}: {error.strerror}") from None
