"""Makes a physical backup of a private MariaDB with a given amount of data and redo log.

The redo log of a backup begins at the server's last checkpoint and ends when the copy ends. So the buffer pool must
hold all changed pages, and the log must have room. The server is loaded until its log is most of the wanted size ahead
of the checkpoint; the backup then runs under load until the wanted size is reached.
"""

from __future__ import annotations

import tarfile
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapmgr.bench.load.mariadb import install, private_mariadb
from snapmgr.mysql.connect.identity import identify
from snapmgr.physical.tools.mariabackup import MariabackupTool
from snapmgr.physical.tools.request import CopyRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from snapmgr.bench.load.mariadb import PrivateMariadb
    from snapmgr.contract.backend import Runner
    from snapmgr.mysql.connect.client import Connection

SCHEMA = "lab"
TABLES = 8
LSN_STATUS = "innodb_lsn_current"
SHARE_BEFORE = 0.8
"""Of the redo log, so much is written before the backup begins."""
_LEAST_ROWS = 1000
_ROWS_A_STATEMENT = 50_000
_ROW_BYTES = 380  # of a table's file, as it comes out
_PAGE_BYTES = 16 << 10
_ROWS_A_PAGE = _PAGE_BYTES // _ROW_BYTES
_REDO_BYTES_A_PAGE = 4096
"""How often a page is changed: a benchmark of transactions wrote 128 MB of log for 32,000 pages."""
_QUERY_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class RedoLoad:
    """The data of a server, and the changes to its pages."""

    data_bytes: int
    """Of all tables together, about."""
    redo_bytes: int

    @property
    def rows(self) -> int:
        """Of each table."""
        return max(self.data_bytes // TABLES // _ROW_BYTES, _LEAST_ROWS)

    @property
    def every(self) -> int:
        """One page in so many is changed."""
        return max(self.data_bytes * _REDO_BYTES_A_PAGE // (self.redo_bytes * _PAGE_BYTES), 1)

    @property
    def pool_bytes(self) -> int:
        """Of the server's buffer pool: nothing may be flushed, or the checkpoint would move."""
        # Undo and system pages besides the changed ones.
        return self.data_bytes * 3 // (self.every * 2) + self.redo_bytes + (128 << 20)

    def server_options(self) -> tuple[str, ...]:
        """Return the settings that keep the server from moving its checkpoint."""
        return (
            f"--innodb-buffer-pool-size={self.pool_bytes}",
            f"--innodb-log-file-size={self.redo_bytes * 3 + (64 << 20)}",
            "--innodb-max-dirty-pages-pct=99.999",
            "--innodb-max-dirty-pages-pct-lwm=0",
            "--innodb-flush-log-at-trx-commit=0",
            "--innodb-autoextend-increment=4",
            "--skip-log-bin",
        )

    def change_until(
        self, lsn: int, execute: Callable[[str], object], current: Callable[[], int], stop: threading.Event
    ) -> None:
        """Change pages, table after table, until `current` returns `lsn` for the log, or `stop` is set."""
        turn = 0
        while not stop.is_set() and current() < lsn:
            execute(change_statement(self.rows, self.every, turn))
            turn += 1


def fill_statements(rows: int) -> Iterator[str]:
    """Yield the statements that fill the tables with `rows` rows each, all different."""
    yield f"CREATE DATABASE {SCHEMA}"
    for number in range(TABLES):
        table = f"{SCHEMA}.t{number}"
        yield f"CREATE TABLE {table} (id INT PRIMARY KEY, n INT NOT NULL, pad CHAR(224) CHARACTER SET latin1)"
        for first in range(1, rows + 1, _ROWS_A_STATEMENT):
            last = min(first + _ROWS_A_STATEMENT - 1, rows)
            # 224 characters of digits that are not the same in any two rows.
            pad = ", ".join(f"SHA2(seq * 8 + {number} + {part}, 224)" for part in range(0, 4000, 1000))
            yield f"INSERT INTO {table} SELECT seq, 0, CONCAT({pad}) FROM {SCHEMA}.seq_{first}_to_{last}"  # noqa: S608


def change_statement(rows: int, every: int, turn: int) -> str:
    """Return what changes one row in each `every`th page of one table: the next one, and the next row, by `turn`."""
    table, first = f"{SCHEMA}.t{turn % TABLES}", turn // TABLES % _ROWS_A_PAGE + 1
    one_a_page = f"{SCHEMA}.seq_{first}_to_{rows}_step_{_ROWS_A_PAGE * every} AS s"
    changed = f"pad = REPEAT(SHA2(id + {turn}, 224), 4)"
    return f"UPDATE {table} AS t JOIN {one_a_page} ON t.id = s.seq SET n = n + 1, {changed}"  # noqa: S608 - our own


def make_backup(load: RedoLoad, *, datadir: Path, target: Path, folder: Path, runner: Runner) -> None:
    """Fill a server, load it, and back it up while it is loaded.

    Args:
        load: how much of what.
        datadir: of the server; must not exist, and stays.
        target: for the backup; must not exist.
        folder: for the server's socket and the logs; nobody else may enter it.
        runner: runs the installer.

    Raises MissingRequirementError for a missing program, CommandError and StorageError.
    """
    install(datadir, runner)
    target.mkdir()
    options = load.server_options()
    with private_mariadb(datadir, folder, options) as server:
        with server.connect() as connection:
            connection.set_read_timeout(_QUERY_S)
            for statement in fill_statements(load.rows):
                connection.execute(statement)
        # Then all is on disk and the checkpoint at the log's end.
        server.stop()
    with private_mariadb(datadir, folder, options) as server:
        with server.connect() as connection:
            connection.set_read_timeout(_QUERY_S)
            _back_up_under_load(load, server, connection, target, folder)
        # The data in its memory are not needed.
        server.kill()


def _back_up_under_load(
    load: RedoLoad, server: PrivateMariadb, connection: Connection, target: Path, folder: Path
) -> None:
    begun, stop = _lsn(connection), threading.Event()

    def change() -> None:
        with server.connect() as another:
            another.set_read_timeout(_QUERY_S)
            load.change_until(begun + load.redo_bytes, another.execute, lambda: _lsn(another), stop)

    before = begun + int(load.redo_bytes * SHARE_BEFORE)
    load.change_until(before, connection.execute, lambda: _lsn(connection), stop)
    with ThreadPoolExecutor(max_workers=1) as pool:
        changing = pool.submit(change)
        try:
            MariabackupTool().back_up(
                CopyRequest(
                    folder=str(target),
                    log=str(folder / "backup.log"),
                    credentials=server.credentials,
                    identity=identify(connection),
                )
            )
        finally:
            stop.set()
        changing.result()


def _lsn(connection: Connection) -> int:
    return int(connection.status(LSN_STATUS)[LSN_STATUS])


class KeptFolder:
    """A folder's contents in a file without a name: whatever ends this process, nothing of it is left."""

    def __init__(self, folder: Path, place: str) -> None:
        """Keep the contents of `folder`; `place` is a folder on a disk with enough space. Raises OSError."""
        self._file = tempfile.TemporaryFile(dir=place)  # noqa: SIM115 - closed by `close`
        try:
            with tarfile.open(fileobj=self._file, mode="w") as archive:
                archive.add(folder, arcname=".")
        except BaseException:
            self.close()
            raise

    def put(self, folder: Path) -> None:
        """Write all of it to the new folder `folder`. Raises OSError."""
        folder.mkdir()
        self._file.seek(0)
        with tarfile.open(fileobj=self._file, mode="r:") as archive:
            # Our own archive: owners, modes and times as they were. (An argument since Python 3.11.4.)
            archive.extraction_filter = lambda member, _path: member
            archive.extractall(folder)  # noqa: S202

    def close(self) -> None:
        """Forget it."""
        self._file.close()
