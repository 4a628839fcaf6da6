"""What the tests of clones share: a scene whose servers end with the test, and ways to look."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pymysql

from snapmgr.catalog.store import Catalog
from snapmgr.system.blockdev import read_mounts
from support.processes import ended, wait_until
from support.storage import processes_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.catalog.manifest import Lease
    from support.scene import Scene


@contextmanager
def ending_clones(scene: Scene) -> Iterator[None]:
    """End, at the end, the servers of clones: they outlive their commands, and would a test that failed."""
    try:
        yield
    finally:
        for pid in processes_of(scene.scratch):
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: ended(pid))  # type: ignore[misc]
        for mount in reversed(read_mounts()):
            if mount.point.startswith(f"{scene.folder}/"):
                # What a killed server had open is closed a moment later.
                wait_until(lambda point=mount.point: unmounted(point))  # type: ignore[misc]


def unmounted(point: object) -> bool:
    """Unmount, and return whether nobody was in it."""
    return subprocess.run(["umount", str(point)], check=False).returncode == 0


@contextmanager
def clones_of(scene: Scene) -> Iterator[None]:
    """Let a scene have a scratch directory of its own and one snapshot; see `ending_clones`."""
    scene.scratch = scene.folder / f"scratch-{time.monotonic_ns()}"
    scene.configure()
    assert scene.run("backup", "demo").returncode == 0
    with ending_clones(scene):
        yield


def leases(scene: Scene) -> list[Lease]:
    """Return the leases; none may be damaged."""
    found, damaged = Catalog(scene.state).leases()
    assert damaged == []
    return found


def nothing_left(scene: Scene) -> None:
    """Assert that there is no clone, mount, folder, lease or server."""
    assert leases(scene) == []
    assert not scene.scratch.exists() or os.listdir(scene.scratch) == []
    assert [mount.point for mount in read_mounts() if mount.point.startswith(f"{scene.folder}/")] == []
    assert [name for name in scene.stored() if name.startswith("attach")] == []
    assert processes_of(scene.scratch) == []


def ask(sql: str, **login: Any) -> tuple[tuple[Any, ...], ...]:
    """Run one statement as who `login` says and return its rows."""
    with pymysql.connect(autocommit=True, ssl_disabled=True, **login) as connection, connection.cursor() as cursor:
        cursor.execute(sql)
        return tuple(cursor.fetchall())


def problems(scene: Scene) -> list[str]:
    """Return what `doctor` says of the state directory; in the storage are the notes of other tests' snapshots."""
    document = json.loads(scene.run("doctor", "--json").stdout)
    return [one["what"] for one in document["findings"] if (one["area"], one["level"]) == ("state", "problem")]
