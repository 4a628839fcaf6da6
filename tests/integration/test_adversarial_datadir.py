"""A datadir whose tables have odd names, and in which the server's user has laid traps for root."""

from __future__ import annotations

import os
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.scene import Scene, btrfs_scene

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "mariadbd")
NAMES = ("a`b", "c\nd", "e'f\"g", "h%s%(i)s{}", "j\\k", "l;-- m", "ñ☃", "[red]x", "n\to", "$(p)")


@pytest.fixture(scope="module", name="scene")
def _scene() -> Iterator[Scene]:
    with btrfs_scene() as scene:
        yield scene


def _datadir(scene: Scene) -> Path:
    return Path(scene.server.datadir)


def test_tables_of_any_name_are_checked(scene: Scene) -> None:
    with scene.server.connect() as connection, connection.cursor() as cursor:
        for name in NAMES:
            quoted = "`" + name.replace("`", "``") + "`"
            cursor.execute(f"CREATE DATABASE {quoted}")
            cursor.execute(f"CREATE TABLE {quoted}.{quoted} (v INT) ENGINE=Aria")
            cursor.execute(f"INSERT INTO {quoted}.{quoted} VALUES (1)")
    done = scene.run("backup", "demo", "--verify")
    assert done.returncode == 0, done.stderr
    (entry,) = scene.entries()
    assert entry.verified
    with scene.server.connect() as connection, connection.cursor() as cursor:
        cursor.execute(
            "SELECT COUNT(*) FROM information_schema.tables WHERE table_type = 'BASE TABLE' "
            "AND table_schema NOT IN ('performance_schema', 'information_schema', 'sys')"
        )
        ((total,),) = cursor.fetchall()
    assert entry.verification is not None
    assert f"CHECK TABLE QUICK of {total} of {total} tables" in entry.verification.checks
    with scene.server.connect() as connection, connection.cursor() as cursor:
        for name in NAMES:
            cursor.execute("DROP DATABASE `" + name.replace("`", "``") + "`")


@contextmanager
def _laid(path: Path, target: str | None) -> Iterator[None]:
    """A symlink, or a FIFO, of the server's user; what was there comes back."""
    owner = path.parent.stat()
    kept = path.with_name(path.name + ".kept")
    if path.exists():
        shutil.copy2(path, kept)
        os.chown(kept, owner.st_uid, owner.st_gid)
        path.unlink()
    if target is None:
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    os.lchown(path, owner.st_uid, owner.st_gid)
    try:
        yield
    finally:
        path.unlink()
        if kept.exists():
            kept.rename(path)


def test_a_fifo_among_the_tablespaces_hangs_nothing(scene: Scene) -> None:
    with _laid(_datadir(scene) / "mysql" / "trap.isl", None):
        done = scene.run("backup", "demo", "--verify", timeout_s=60)
    assert done.returncode in (0, 4, 5), done.stderr
    assert "Traceback" not in done.stderr


def test_a_linked_index_of_the_binary_logs_is_refused(scene: Scene) -> None:
    victim = scene.folder / "victim"
    victim.write_text("root:x:0:0\n./other/line\n")
    index = _datadir(scene) / "binlog.index"
    # Relative: an absolute one is found anyway. Deep enough from wherever the clone is mounted.
    with _laid(index, "../" * 20 + str(victim).lstrip("/")):
        taken = scene.run("backup", "demo")
    assert taken.returncode == 4
    assert "binlog.index" in taken.stderr
    assert victim.read_text() == "root:x:0:0\n./other/line\n"
