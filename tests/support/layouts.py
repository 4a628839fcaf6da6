"""Servers whose parts lie on several volumes, and how a snapshot of them is compared."""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pymysql

from snapmgr.access.attach import attached, copies, data_path
from snapmgr.config.model import Verify
from snapmgr.mysql.server.program import server_for
from snapmgr.mysql.server.throwaway import run_folder, throwaway
from snapmgr.verify.binlog_check import BinlogFindings, check_binlog, compare_gtid
from support.kinds import KINDS
from support.load import check_invariant
from support.scene import Scene
from support.server import private_server, server_user
from support.storage import loop_filesystem, work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.context import Context
    from support.exactness import Taken

_GIB = 1 << 30
SETTINGS = {
    "mysql": {
        "redo": "innodb-log-group-home-dir",
        "undo": "innodb-undo-directory",
        "dblwr": "innodb-doublewrite-dir",
        "system": "innodb-data-home-dir",
    },
    "mariadb": {
        "redo": "innodb-log-group-home-dir",
        "undo": "innodb-undo-directory",
        "aria": "aria-log-dir-path",
        "system": "innodb-data-home-dir",
    },
}
"""By flavor: the settings that put a part of the data elsewhere, by the part's name."""


def subvolume(path: Path) -> Path:
    """Make a btrfs subvolume of the server's user."""
    subprocess.run(["btrfs", "-q", "subvolume", "create", path], check=True)
    return owned(path)


def owned(path: Path) -> Path:
    """Give a folder, made if it is missing, to the server's user."""
    path.mkdir(parents=True, exist_ok=True)
    os.chown(path, server_user().pw_uid, server_user().pw_gid)
    return path


@contextmanager
def memory(point: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs of this size ("64M") of the server's user at `point` while the context lasts."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", owned(point)], check=True)
    try:
        yield owned(point)
    finally:
        subprocess.run(["umount", "--lazy", "--quiet", point], check=False)


def moved(kind: str, home: Path, *parts: str) -> tuple[str, ...]:
    """Return the options that put `parts` of a server (by default all of `SETTINGS`) into folders of `home`."""
    settings = SETTINGS[KINDS[kind].flavor]
    return tuple(f"--{settings[part]}={owned(home / part)}" for part in parts or settings)


@contextmanager
def scattered(
    kind: str, fs_type: str, *parts: str, options: tuple[str, ...] = (), level: str = "freeze-process"
) -> Iterator[Scene]:
    """Yield a scene whose server has `parts` (see `moved`) on another file system than its datadir.

    On btrfs both are subvolumes: "mysql" and "parts".
    """
    with ExitStack() as stack:
        first = stack.enter_context(loop_filesystem(fs_type, _GIB))
        second = stack.enter_context(loop_filesystem(fs_type, _GIB))
        folder = stack.enter_context(work_folder())
        volume, other = first.point, second.point
        if fs_type == "btrfs":
            volume, other = subvolume(first.point / "mysql"), subvolume(second.point / "parts")
        elsewhere = moved(kind, other, *parts)
        server = stack.enter_context(
            private_server(
                volume / "data", (*elsewhere, *options), install_options=(*elsewhere, *_undo(kind)), kind=kind
            )
        )
        scene = Scene(first, folder, server)
        scene.configure(f'quiesce = "{level}"')
        yield scene


def _undo(kind: str) -> tuple[str, ...]:
    # MariaDB makes them only at the installation; MySQL always has two.
    return ("--innodb-undo-tablespaces=2",) if KINDS[kind].flavor == "mariadb" else ()


def check(ctx: Context, taken: Taken, kind: str) -> BinlogFindings:
    """Start a server on a clone, as verify does, and compare it with the record and with what was acknowledged.

    Raises InvariantError; what else is wrong is in `BinlogFindings.failures`.
    """
    entry = ctx.catalog.load(taken.manifest.id)
    manifest, found = entry.manifest, BinlogFindings()
    assert manifest.server is not None
    with attached(ctx, entry) as lease, run_folder(ctx.config.scratch_dir) as run_dir:
        there = copies(lease, manifest)
        check_binlog(manifest, there, found)
        with throwaway(
            server_for(manifest.server, data_path(lease), None),
            data_path(lease),
            settings=manifest.server.settings,
            memory_bytes=Verify().memory_bytes,
            run_dir=run_dir,
            originals=there,
        ) as server:
            with server.connect() as connection:
                compare_gtid(manifest, connection, found)
            with pymysql.connect(
                unix_socket=server.socket, user="root", autocommit=True, ssl_disabled=True
            ) as connection:
                check_invariant(connection, before=taken.before, after=taken.after, engines=KINDS[kind].engines)
            found.failures += server.complaints()
    return found
