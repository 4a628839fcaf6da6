"""One table of a snapshot comes back as a dump, and nothing else changes."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.kinds import KINDS
from support.scene import btrfs_scene
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.scene import Scene

# The system's MariaDB may come without a dump program.
NEWER = [pytest.param(name, marks=pytest.mark.needs(name)) for name in ("mariadb-11.8", "mysql-9")]
pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")


@pytest.fixture(name="shop", scope="module", params=NEWER)
def _shop(request: pytest.FixtureRequest) -> Iterator[Scene]:
    """A scene with one snapshot, after which the tables were dropped."""
    with btrfs_scene(kind=request.param) as scene:
        query = scene.server.query
        scene.configure(f'verify.server = "{KINDS[request.param].program("mysqld")}"')
        query("CREATE DATABASE shop")
        query("CREATE TABLE shop.orders (id INT PRIMARY KEY, what LONGBLOB)")
        query("INSERT INTO shop.orders VALUES (1, REPEAT('x', 100000)), (2, X'00FF')")
        query("CREATE TABLE shop.items (id INT PRIMARY KEY)")
        query("CREATE TABLE shop.other (id INT PRIMARY KEY)")
        assert scene.run("backup", "demo").returncode == 0
        query("DROP TABLE shop.orders, shop.items")
        yield scene


@pytest.fixture(name="folder")
def _folder() -> Iterator[Path]:
    with work_folder() as folder:
        yield folder


def test_dropped_tables_come_back(shop: Scene, folder: Path) -> None:
    dest = folder / "orders.sql"
    arguments = ("restore", "latest", str(dest), "--table", "shop.orders", "--table", "shop.items")
    planned = shop.run(*arguments, "--dry-run")
    assert (planned.returncode, dest.exists()) == (0, False)
    document = shop.json(*arguments)
    assert document["dumped"]["size_bytes"] == dest.stat().st_size
    assert (dest.stat().st_mode & 0o777, os.listdir(folder)) == (0o600, ["orders.sql"])
    text = dest.read_text()
    assert "DROP" not in text
    assert "`other`" not in text
    kind = shop.server.kind
    client = [kind.program("mysql"), "--no-defaults", f"--socket={shop.server.socket}", "--user=root", "recovered"]
    shop.server.query("CREATE DATABASE IF NOT EXISTS recovered")
    with dest.open() as file:
        subprocess.run(client, stdin=file, check=True)
    assert shop.server.query("SELECT id, LENGTH(what), HEX(RIGHT(what, 1)) FROM recovered.orders ORDER BY id") == (
        (1, 100000, "78"),
        (2, 2, "FF"),
    )
    assert shop.server.query("SHOW TABLES IN recovered") == (("items",), ("orders",))
    # Nothing is overwritten, and no clone is left.
    again = shop.run(*arguments)
    assert (again.returncode, "overwrites nothing" in again.stderr) == (2, True)
    assert shop.json("mount", "--list")["mounts"] == []


@pytest.mark.parametrize(
    ("table", "code", "said"),
    [
        ("shop.nothing", 1, "has no table shop.nothing"),
        ("orders", 2, "write DATABASE.TABLE"),
        ("mysql.user", 2, "are of several databases"),
    ],
)
def test_what_cannot_be_dumped_leaves_no_file(shop: Scene, folder: Path, table: str, code: int, said: str) -> None:
    more = ("--table", "shop.other") if table == "mysql.user" else ()
    done = shop.run("restore", "latest", str(folder / "x.sql"), "--table", table, *more)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert os.listdir(folder) == []


def test_a_table_that_cannot_be_read_completely_is_an_error_and_no_file(shop: Scene, folder: Path) -> None:
    """MariaDB returns a damaged BLOB as empty, and only its log says why; MySQL ends."""
    shop.server.query("CREATE TABLE shop.damaged (id INT PRIMARY KEY, what LONGBLOB)")
    shop.server.query("INSERT INTO shop.damaged VALUES (1, REPEAT('x', 1000000))")
    shop.server.stop()
    path, page = shop.server.datadir / "shop/damaged.ibd", 16384
    data = path.read_bytes()
    # Page type 10: a BLOB's; MySQL's newer ones are 22 and 23.
    kinds = [int.from_bytes(data[start + 24 : start + 26], "big") for start in range(0, len(data), page)]
    blobs = [number for number, kind in enumerate(kinds) if kind in (10, 22, 23)]
    assert len(blobs) > 20
    with path.open("r+b") as file:
        file.seek(blobs[len(blobs) // 2] * page + 2000)
        file.write(os.urandom(64))
    shop.server.start()
    assert shop.run("backup", "demo").returncode == 0
    done = shop.run("restore", "latest", str(folder / "x.sql"), "--table", "shop.damaged")
    assert done.returncode == 6, done.stderr
    assert "the tables cannot be read completely" in done.stderr
    assert os.listdir(folder) == []
