"""A physical backup with as much data and redo log as wanted, made by mariadb-backup under load and kept in a cache.

The redo log of a backup begins at the server's last checkpoint and ends where the copy ended. So a server whose buffer
pool holds all that is changed, and whose log has room, is loaded until its log is most of the wanted size behind its
checkpoint; then it is backed up while the load goes on until the wanted size is reached.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapmgr.command import find_program
from support.kinds import cache_folder
from support.server import PrivateServer, private_server, server_user
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pymysql.cursors import Cursor

SCHEMA = "lab"
_RECIPE = 1
"""In the cached folders' names: another way of making them needs another number."""
_TABLES = 8
_ROW_BYTES = 380  # of a table's file, as it comes out
_PAGE_BYTES = 16 << 10
_ROWS_A_PAGE = _PAGE_BYTES // _ROW_BYTES
_REDO_BYTES_A_PAGE = 4096
"""How often a page is changed: a benchmark of transactions wrote 128 MB of log for 32,000 pages."""
_SHARE_BEFORE = 0.8
_ROOMY = Path("/var/tmp")  # where much may lie; /tmp may be memory
_REDO_NAME = "ib_logfile0"


@dataclass(frozen=True, kw_only=True)
class RedoBackup:
    """A finished, pristine backup. Nobody may write to it: copy or clone it."""

    folder: Path
    data_bytes: int
    """Of all its files but the redo log."""
    redo_bytes: int
    files: int
    checksums: dict[str, int]
    """CHECKSUM TABLE of each table, after a plain prepare of a plain copy."""
    plain_prepare_s: float
    """What that prepare took where the cache is."""

    def __str__(self) -> str:
        sizes = f"{self.data_bytes:,} bytes of data and {self.redo_bytes:,} of redo log in {self.files} files"
        return f"{sizes}; a plain prepare on the local disk took {self.plain_prepare_s} s"


def redo_backup(data_bytes: int, redo_bytes: int, *, cache: Path | None = None) -> RedoBackup:
    """Return a backup of about `data_bytes` with about `redo_bytes` of redo log, from the cache or made now.

    Making one takes about a second for 10 MB of either. `cache` is the folder in which they are kept, by default "lab"
    beside the servers' folder.
    """
    base = cache or cache_folder().parent / "lab"
    kept = base / f"backup-{_RECIPE}-{data_bytes >> 20}-{redo_bytes >> 20}"
    facts = kept / "facts.json"
    if not facts.exists():
        base.mkdir(parents=True, exist_ok=True)
        _sweep_killed(base)
        # Servers run as another user, who may not enter the cache; what is kept is made beside its place.
        with work_folder(_ROOMY) as work, work_folder(base) as beside:
            making = beside / "made"
            making.mkdir()
            made = _make(work, making / "files", data_bytes, redo_bytes)
            (making / "facts.json").write_text(json.dumps(made))
            try:
                making.rename(kept)
            except OSError:  # somebody else was quicker
                if not facts.exists():
                    raise
    return RedoBackup(folder=kept / "files", **json.loads(facts.read_text()))


def _sweep_killed(base: Path) -> None:
    """Remove what runs that were killed have left half made."""
    for folder in base.glob("snapmgr-test-*-*"):
        if not Path("/proc", folder.name.split("-")[2]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def _make(work: Path, folder: Path, data_bytes: int, redo_bytes: int) -> dict[str, Any]:
    _back_up_under_load(work / "datadir", folder, data_bytes, redo_bytes)
    sizes = {path.name: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    plain = work / "plain"
    shutil.copytree(folder, plain)
    started = time.monotonic()
    _tool("--prepare", f"--target-dir={plain}", log=work / "prepare.log")
    took = time.monotonic() - started
    return {
        "data_bytes": total - sizes[_REDO_NAME],
        "redo_bytes": sizes[_REDO_NAME],
        "files": sum(path.is_file() for path in folder.rglob("*")),
        "checksums": table_checksums(plain),
        "plain_prepare_s": round(took, 2),
    }


def _back_up_under_load(datadir: Path, target: Path, data_bytes: int, redo_bytes: int) -> None:
    every = max(data_bytes * _REDO_BYTES_A_PAGE // (redo_bytes * _PAGE_BYTES), 1)
    # Undo and system pages beside what is changed; nothing may be flushed, or the checkpoint would move.
    pool = data_bytes * 3 // (every * 2) + redo_bytes + (128 << 20)
    loaded = [
        f"--innodb-buffer-pool-size={pool}",
        f"--innodb-log-file-size={redo_bytes * 3 + (64 << 20)}",
        "--innodb-max-dirty-pages-pct=99.999",
        "--innodb-max-dirty-pages-pct-lwm=0",
        "--innodb-flush-log-at-trx-commit=0",
        "--innodb-autoextend-increment=4",
        "--skip-log-bin",
    ]
    with private_server(datadir, loaded) as server:
        rows = fill_tables(server, data_bytes)
        # All is on disk and the checkpoint at the log's end.
        server.restart()
        with server.connect() as connection, connection.cursor() as cursor:
            begun = _lsn(cursor)
        stop = threading.Event()
        _load(server, rows, every, begun + int(redo_bytes * _SHARE_BEFORE), stop)
        with _background(lambda: _load(server, rows, every, begun + redo_bytes, stop), stop):
            _tool("--backup", f"--target-dir={target}", f"--socket={server.socket}", log=datadir.parent / "backup.log")
        server.kill()


def fill_tables(server: PrivateServer, data_bytes: int) -> int:
    """Make tables of about `data_bytes` together; return how many rows each has."""
    rows = max(data_bytes // _TABLES // _ROW_BYTES, 1000)
    server.query(f"CREATE DATABASE {SCHEMA}")
    for number in range(_TABLES):
        table = f"{SCHEMA}.t{number}"
        server.query(f"CREATE TABLE {table} (id INT PRIMARY KEY, n INT NOT NULL, pad CHAR(224) CHARACTER SET latin1)")
        step = 50_000
        for first in range(1, rows + 1, step):
            last = min(first + step - 1, rows)
            # 224 characters of digits that are not the same in any two rows.
            pad = ", ".join(f"SHA2(seq * 8 + {number} + {part}, 224)" for part in range(0, 4000, 1000))
            server.query(f"INSERT INTO {table} SELECT seq, 0, CONCAT({pad}) FROM {SCHEMA}.seq_{first}_to_{last}")
    return rows


def change_pages(cursor: Cursor, rows: int, every: int, turn: int) -> None:
    """Change one row in each `every`th page of one table: the next one, and the next row, with each `turn`."""
    table, first = f"{SCHEMA}.t{turn % _TABLES}", turn // _TABLES % _ROWS_A_PAGE + 1
    one_a_page = f"{SCHEMA}.seq_{first}_to_{rows}_step_{_ROWS_A_PAGE * every} AS s"
    changed = f"pad = REPEAT(SHA2(id + {turn}, 224), 4)"
    cursor.execute(f"UPDATE {table} AS t JOIN {one_a_page} ON t.id = s.seq SET n = n + 1, {changed}")


def _load(server: PrivateServer, rows: int, every: int, until_lsn: int, stop: threading.Event) -> None:
    """Change a row in each `every`th page of a table after the other, until the log is at `until_lsn`."""
    with server.connect() as connection, connection.cursor() as cursor:
        turn = 0
        while not stop.is_set() and _lsn(cursor) < until_lsn:
            change_pages(cursor, rows, every, turn)
            turn += 1


def _lsn(cursor: Cursor) -> int:
    cursor.execute("SHOW GLOBAL STATUS LIKE 'Innodb_lsn_current'")
    ((_, value),) = cursor.fetchall()
    return int(value)


@contextmanager
def _background(action: Callable[[], None], stop: threading.Event) -> Iterator[None]:
    """Run `action` in a thread while the context lasts; what it raised is raised at the end."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - raised below
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


def _tool(*arguments: str, log: Path) -> None:
    """Run mariadb-backup. Raises AssertionError with the end of its log if it did not say that it has completed."""
    with log.open("wb") as output:
        code = subprocess.run(
            [find_program("mariadb-backup"), "--no-defaults", *arguments],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        ).returncode
    lines = log.read_text(errors="replace").splitlines()
    if code or not lines or not lines[-1].endswith("completed OK!"):
        raise AssertionError(f"mariadb-backup ended with {code}: {lines[-20:]}")


def table_checksums(datadir: Path) -> dict[str, int]:
    """Start a server on a prepared folder and return CHECKSUM TABLE … EXTENDED of each of its tables.

    The folder is the server's afterwards: its owner changes and it is written to.
    """
    if os.geteuid() == 0:
        user = server_user()
        for path in [datadir, *datadir.rglob("*")]:
            os.chown(path, user.pw_uid, user.pw_gid)
    (datadir / "aria_log_control").unlink(missing_ok=True)
    with private_server(datadir, ["--skip-log-bin"], install_options=None) as server:
        return checksums(server)


def checksums(server: PrivateServer) -> dict[str, int]:
    """Return CHECKSUM TABLE … EXTENDED of each table of a running server."""
    names = ", ".join(f"{SCHEMA}.t{number}" for number in range(_TABLES))
    return dict(server.query(f"CHECKSUM TABLE {names} EXTENDED"))
