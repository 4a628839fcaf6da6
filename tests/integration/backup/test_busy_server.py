"""Backups of a server that is never idle; `./run measure busy` does the same with a thousand clients."""

from __future__ import annotations

import pytest

from support.busy import busy_clients, server_options
from support.kinds import each_kind
from support.scene import btrfs_scene
from support.thoroughness import CAMPAIGN

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "mariadbd", "sysbench")
CLIENTS, BACKUPS = (1000, 20) if CAMPAIGN else (100, 2)


@each_kind
def test_a_busy_server_is_backed_up_with_an_exact_position(kind: str) -> None:
    """With the lock if it is free at once, else without one; each time the position is the copy's own."""
    with (
        btrfs_scene(*server_options(CLIENTS), size_bytes=4 << 30, kind=kind) as scene,
        busy_clients(scene.server, scene.folder, CLIENTS) as clients,
    ):
        for number in range(BACKUPS):
            done = scene.run("backup", "demo", *(["--verify"] if number == 0 else []))
            assert done.returncode == 0, done.stderr
            manifest = scene.entries()[-1].manifest
            assert manifest.position is not None
            assert manifest.quiesce is not None
            assert manifest.quiesce.level in ("backup-lock", "crash-consistent")
            assert manifest.quiesce.position_from == ("server" if manifest.quiesce.level == "backup-lock" else "binlog")
        clients.check_alive()
