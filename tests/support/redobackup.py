"""A physical backup with as much data and redo log as wanted, made by mariadb-backup under load and kept in a cache.

What the load is, and why it leaves so much redo log: `snapmgr.bench.prepare.redobackup`.
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

from snapmgr.bench.prepare.redobackup import SCHEMA, SHARE_BEFORE, TABLES, RedoLoad, change_statement, fill_statements
from snapmgr.system.command import find_program
from support.kinds import cache_folder
from support.server import PrivateServer, private_server, server_user
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pymysql.cursors import Cursor

_RECIPE = 1
"""In the cached folders' names: another way of making them needs another number."""
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
    load = RedoLoad(data_bytes=data_bytes, redo_bytes=redo_bytes)
    with private_server(datadir, load.server_options()) as server:
        fill_tables(server, data_bytes)
        # All is on disk and the checkpoint at the log's end.
        server.restart()
        with server.connect() as connection, connection.cursor() as cursor:
            begun = _lsn(cursor)
        stop = threading.Event()
        _load(server, load, begun + int(redo_bytes * SHARE_BEFORE), stop)
        with _background(lambda: _load(server, load, begun + redo_bytes, stop), stop):
            _tool("--backup", f"--target-dir={target}", f"--socket={server.socket}", log=datadir.parent / "backup.log")
        server.kill()


def fill_tables(server: PrivateServer, data_bytes: int) -> int:
    """Make tables of about `data_bytes` together; return how many rows each has."""
    rows = RedoLoad(data_bytes=data_bytes, redo_bytes=data_bytes).rows
    for statement in fill_statements(rows):
        server.query(statement)
    return rows


def change_pages(cursor: Cursor, rows: int, every: int, turn: int) -> None:
    """Change one row in each `every`th page of one table: the next one, and the next row, with each `turn`."""
    cursor.execute(change_statement(rows, every, turn))


def _load(server: PrivateServer, load: RedoLoad, until_lsn: int, stop: threading.Event) -> None:
    """Change a row in each `every`th page of a table after the other, until the log is at `until_lsn`."""
    with server.connect() as connection, connection.cursor() as cursor:
        load.change_until(until_lsn, cursor.execute, lambda: _lsn(cursor), stop)


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
    names = ", ".join(f"{SCHEMA}.t{number}" for number in range(TABLES))
    return dict(server.query(f"CHECKSUM TABLE {names} EXTENDED"))
