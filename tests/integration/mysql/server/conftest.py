"""A running server with a table in each engine, and copies of its datadir."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from snapmgr.mysql.connect.client import Credentials, connect
from snapmgr.mysql.connect.identity import identify
from snapmgr.mysql.datadir.layout import read_layout
from snapmgr.mysql.server.program import find_server
from support.copies import ROWS, frozen
from support.server import PrivateServer, private_server
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from snapmgr.mysql.datadir.layout import ServerLayout


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    with work_folder() as folder:
        yield folder


@pytest.fixture(scope="module")
def source(base: Path) -> Iterator[tuple[PrivateServer, ServerLayout]]:
    """A running server with a table in each engine, and its layout."""
    with private_server(base / "live", ["--default-storage-engine=InnoDB"]) as server:
        server.query("CREATE DATABASE shop")
        server.query("CREATE DATABASE `we``ird é`")
        server.query("CREATE TABLE `we``ird é`.`t``ä.1` (a INT) ENGINE=InnoDB")
        for engine in ("InnoDB", "Aria", "MyISAM"):
            server.query(f"CREATE TABLE shop.{engine} (id INT PRIMARY KEY, t VARCHAR(200), KEY (t)) ENGINE={engine}")
            server.query(
                f"INSERT INTO shop.{engine} SELECT seq, REPEAT(CHAR(65 + seq % 26), 150) FROM shop.seq_1_to_{ROWS}"
            )
        server.query("CREATE VIEW shop.v AS SELECT * FROM shop.InnoDB")
        server.query("CREATE TABLE shop.blobs (id INT PRIMARY KEY, b LONGBLOB) ENGINE=InnoDB")
        server.query("INSERT INTO shop.blobs SELECT seq, REPEAT(CHAR(65 + seq % 26), 50000) FROM shop.seq_1_to_50")
        # Else crash recovery writes every page anew, and no damage to a page outlives it.
        server.restart()
        with connect(Credentials(socket=server.socket)) as connection:
            yield server, read_layout(connection, identify(connection))


@pytest.fixture
def copy(source: tuple[PrivateServer, ServerLayout], base: Path) -> Iterator[Path]:
    """A crash-consistent copy of the live datadir."""
    server, _ = source
    target = base / "copy"
    with frozen(server):
        subprocess.run(["cp", "-a", "--reflink=auto", str(server.datadir), str(target)], check=True)
    yield target
    shutil.rmtree(target)


@pytest.fixture
def run_dir() -> Iterator[str]:
    with work_folder() as folder:
        yield str(folder / "run")


@pytest.fixture(scope="module")
def binary():
    return find_server("mariadb")
