"""Command lines of the servers' own backup tools, and what we make of the files and logs that real ones left."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapmgr.catalog.manifest import Position
from snapmgr.contract.errors import MissingRequirementError, StorageError
from snapmgr.mysql.connect.client import Credentials
from snapmgr.mysql.connect.identity import ServerIdentity
from snapmgr.physical.tools.infofile import read_info
from snapmgr.physical.tools.mariabackup import MariabackupTool
from snapmgr.physical.tools.request import ApplyRequest, BackupInfo, BrokenChainError, CopyRequest
from snapmgr.physical.tools.toolreason import explain
from snapmgr.physical.tools.xtrabackup import XtrabackupTool

_RECORDED = Path(__file__).parent / "physical"
_LOGIN = "/proc/1/fd/3"


def identity(flavor: str = "mariadb", version: str = "10.11.19-MariaDB") -> ServerIdentity:
    return ServerIdentity(
        pid=1,
        start_ticks=1,
        uid=100,
        gid=100,
        flavor=flavor,
        version=version,
        server_id=1,
        server_uuid=None,
        datadir="/var/lib/mysql",
        socket="/run/mysqld/mysqld.sock",
    )


def copy_request(**changes) -> CopyRequest:
    given = {"folder": "/s/data", "log": "/s/log", "credentials": Credentials(), "identity": identity(), "parallel": 4}
    return CopyRequest(**given | changes)


def apply_request(**changes) -> ApplyRequest:
    return ApplyRequest(**{"folder": "/s/data", "log": "/s/log"} | changes)


@pytest.mark.parametrize(
    ("changes", "replica", "line"),
    [
        ({}, False, ""),
        ({"from_lsn": 44894}, False, " --incremental-lsn=44894"),
        ({"throttle": 20}, True, " --throttle=20 --slave-info"),
        ({"options": ("--open-files-limit=9999",)}, False, " --open-files-limit=9999"),
    ],
)
def test_a_backup_by_mariadb_backup(changes, replica, line):
    argv = MariabackupTool().backup_argv("/usr/bin/mariadb-backup", _LOGIN, copy_request(**changes), replica=replica)
    begin = "/usr/bin/mariadb-backup --defaults-file=/proc/1/fd/3 --backup --target-dir=/s/data --parallel=4"
    assert " ".join(argv) == begin + line


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, ""),
        # It has no such option, and needs none: an increment may follow on any prepare.
        ({"redo_only": True}, ""),
        ({"use_memory_bytes": 1 << 30}, " --use-memory=1073741824"),
        ({"increment": "/s/inc"}, " --incremental-dir=/s/inc"),
    ],
)
def test_a_prepare_by_mariadb_backup(changes, line):
    argv = MariabackupTool().apply_argv("mariadb-backup", apply_request(**changes))
    assert " ".join(argv) == "mariadb-backup --no-defaults --prepare --target-dir=/s/data" + line


@pytest.mark.parametrize(
    ("changes", "replica", "line"),
    [
        ({}, False, ""),
        ({"from_lsn": 19}, False, " --incremental-lsn=19"),
        ({"throttle": 5, "options": ("--lock-ddl=OFF",)}, True, " --throttle=5 --slave-info --lock-ddl=OFF"),
    ],
)
def test_a_backup_by_xtrabackup_is_checked_for_the_servers_version(changes, replica, line):
    argv = XtrabackupTool().backup_argv("xtrabackup", _LOGIN, copy_request(**changes), replica=replica)
    begin = (
        "xtrabackup --defaults-file=/proc/1/fd/3 --backup --target-dir=/s/data --datadir=/var/lib/mysql --parallel=4"
    )
    assert " ".join(argv) == begin + line
    assert "--no-server-version-check" not in argv


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "--target-dir=/s/data"),
        ({"redo_only": True}, "--apply-log-only --target-dir=/s/data"),
        (
            {"redo_only": True, "increment": "/s/inc", "use_memory_bytes": 4096},
            "--apply-log-only --target-dir=/s/data --use-memory=4096 --incremental-dir=/s/inc",
        ),
    ],
)
def test_xtrabackup_leaves_a_backup_open_for_increments_only_with_apply_log_only(changes, line):
    argv = XtrabackupTool().apply_argv("xtrabackup", apply_request(**changes))
    assert " ".join(argv) == "xtrabackup --no-defaults --prepare " + line


@pytest.mark.parametrize("series", ["10.11", "11.8"])
def test_what_mariadb_backup_writes_down_is_read_by_its_older_and_newer_names(series):
    full, increment = read_info(_RECORDED / f"full-{series}"), read_info(_RECORDED / f"increment-{series}")
    assert (full.tool, full.flavor, full.state, full.from_lsn) == ("mariadb-backup", "mariadb", "raw", 0)
    assert full.server_version.startswith(f"{series}.")
    assert full.tool_version.startswith(f"{series}.")
    assert full.position is not None
    assert (full.position.file, full.position.gtid) == ("binlog.000001", "0-1-3")
    assert not full.is_increment
    assert increment.is_increment
    assert increment.from_lsn == full.to_lsn > 0
    assert increment.last_lsn > full.last_lsn
    assert increment.position is not None
    assert increment.position.offset > full.position.offset
    prepared = read_info(_RECORDED / f"prepared-{series}")
    assert (prepared.state, prepared.to_lsn, prepared.position) == ("prepared", full.to_lsn, full.position)


def test_what_xtrabackup_writes_down_is_open_for_increments_only_after_apply_log_only(tmp_path):
    # As the manual has them; XtraBackup was not run here.
    (tmp_path / "xtrabackup_info").write_text(
        "uuid = 1\nname = \ntool_name = xtrabackup\ntool_version = 8.4.0-3\nserver_version = 8.4.3\n"
        "partial = N\nincremental = N\nformat = file\ncompressed = N\nencrypted = N\n"
    )
    (tmp_path / "xtrabackup_binlog_info").write_text(
        "bin.000007\t1921\t7c9a1b7e-c6a5-11ef-a5a5-02fc00000001:1-52,\n8c9a1b7e-c6a5-11ef-a5a5-02fc00000001:1-7\n"
    )
    found: dict[str, BackupInfo] = {}
    for kind in ("full-backuped", "log-applied", "full-prepared"):
        (tmp_path / "xtrabackup_checkpoints").write_text(
            f"backup_type = {kind}\nfrom_lsn = 0\nto_lsn = 100\nlast_lsn = 120\nflushed_lsn = 110\nredo_memory = 0\n"
        )
        found[kind] = read_info(tmp_path)
    assert [one.state for one in found.values()] == ["raw", "redo-applied", "prepared"]
    assert found["log-applied"].tool == "xtrabackup"
    assert found["log-applied"].position == Position(
        file="bin.000007",
        offset=1921,
        gtid="7c9a1b7e-c6a5-11ef-a5a5-02fc00000001:1-52,8c9a1b7e-c6a5-11ef-a5a5-02fc00000001:1-7",
    )


@pytest.mark.parametrize(
    ("log", "kind", "message", "hint"),
    [
        (
            "denied",
            MissingRequirementError,
            "lacks rights: RELOAD, PROCESS",
            "GRANT RELOAD, PROCESS ON *.* TO 'poor'@'localhost';",
        ),
        ("full-disk", StorageError, "file system is full", "make room"),
        ("server-died", StorageError, "connection to the server was lost", "did the server stop"),
        ("redo-overwritten", StorageError, "overwrote redo log", "innodb_log_file_size"),
        ("improper", BrokenChainError, "does not fit the backup", "full backup"),
        ("increment-on-raw", StorageError, "whose redo log was applied", "prepare it first"),
        ("unprepared", StorageError, "no finished backup", "folder that the tool has made"),
    ],
)
def test_a_failure_is_explained_from_the_log(log, kind, message, hint):
    lines = (_RECORDED / f"{log}-10.11.log").read_text().splitlines()
    error = explain(lines, 1, what="mariadb-backup: the backup", log="/s/log", account="'poor'@'localhost'")
    assert isinstance(error, kind)
    assert isinstance(error, BrokenChainError) == (kind is BrokenChainError)
    assert message in error.message
    assert hint in (error.hint or "")
    assert len(error.message) < 2000
    assert "2026-11-22" not in error.message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "[00] 2026-11-22 09:15:57 Was only able to copy log from 58087 to 59916, not 68968; try increasing",
            "overwrote redo log",
        ),
        ("xtrabackup: error: log block numbers mismatch:", "overwrote redo log"),
        ("mariabackup: Error writing file './x' (errno: 24 \"Too many open files\")", "as many files as there are"),
        ("[00] FATAL ERROR: 2026-11-22 09:15:57 failed to read page: page corruption", "page of the data is damaged"),
        (
            "An optimized (without redo logging) DDL operation has been performed. All modified pages may not have",
            "without writing redo log",
        ),
        ("Unsupported server version 5.5.68-MariaDB.", "does not fit the server's version"),
        ("", "it said nothing"),
        ("[00] 2026-11-22 09:15:57 something that nobody knows", "something that nobody knows"),
    ],
)
def test_a_failure_that_could_not_be_recorded_is_told_by_its_line(line, message):
    assert message in explain([line], 1, what="the backup", log="/s/log", account="a").message
