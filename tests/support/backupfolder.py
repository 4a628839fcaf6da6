"""Backups by mariadb-backup, made under load, and what a server on one of them says."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from support.load import write_load
from support.server import private_server, server_user

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROWS = 4_000
_FILLER = "REPEAT(MD5(seq), 100)"


@dataclass(frozen=True, kw_only=True)
class BackupSite:
    """A backup of a loaded server, and the tables that each prepare of it must give."""

    full: Path
    """The backup, with redo to apply; it belongs to the server's user. Never to be changed."""
    tables: dict[str, int]
    """Checksums of all tables, from a copy that was prepared by hand."""


@contextmanager
def loaded_backup(folder: Path, work: Path) -> Iterator[BackupSite]:
    """Back up a server under load to ``folder/full``; `work` gets the server's files, gone at the end."""
    full = folder / "full"
    with private_server(work / "data") as server:
        server.query("CREATE DATABASE big")
        for number in range(3):
            server.query(
                f"CREATE TABLE big.t{number} (id INT PRIMARY KEY, v BIGINT, filler TEXT) ENGINE=InnoDB "
                f"SELECT seq AS id, 0 AS v, {_FILLER} AS filler FROM big.seq_1_to_{_ROWS // (number + 1)}"
            )
        with write_load(str(server.socket), writers=2, pause_s=0.0) as load:
            load.warm_up()
            # Dirty pages that the backup copies as they were, so that their redo has to be applied.
            server.query("SET GLOBAL innodb_max_dirty_pages_pct=99, innodb_max_dirty_pages_pct_lwm=99")
            server.query("UPDATE big.t0 SET v = v + id")
            server.query("UPDATE big.t1 SET v = v + 2 * id WHERE id % 3 = 0")
            back_up(str(server.socket), full)
    reference = work / "reference"
    shutil.copytree(full, reference)
    subprocess.run(
        ["mariadb-backup", "--no-defaults", "--prepare", f"--target-dir={reference}"], check=True, capture_output=True
    )
    give_to_server(reference)
    tables = checksums(reference)
    shutil.rmtree(reference)
    yield BackupSite(full=full, tables=tables)


def back_up(socket: str, target: Path) -> None:
    """Run mariadb-backup on a server; the backup belongs to the server's user."""
    subprocess.run(
        ["mariadb-backup", "--no-defaults", "--backup", "--user=root", f"--socket={socket}", f"--target-dir={target}"],
        check=True,
        capture_output=True,
    )
    give_to_server(target)


def give_to_server(folder: Path) -> None:
    """Let a folder and all in it belong to the user that servers run as."""
    user = server_user()
    for path in (folder, *folder.rglob("*")):
        os.chown(path, user.pw_uid, user.pw_gid)


def checksums(datadir: Path) -> dict[str, int]:
    """Start a server on a prepared datadir, and return the checksum of each table of users."""
    with private_server(datadir, install_options=None) as server:
        assert "Starting crash recovery" not in server.log_text()
        names = [
            f"`{schema}`.`{name}`"
            for schema, name in server.query(
                "SELECT table_schema, table_name FROM information_schema.tables "
                "WHERE table_schema IN ('big', 'load_test') AND table_type = 'BASE TABLE'"
            )
        ]
        return {name: int(server.query(f"CHECKSUM TABLE {name} EXTENDED")[0][1]) for name in names}
