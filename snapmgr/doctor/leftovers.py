"""Finds files and folders that killed processes left in the state directory and in the scratch directory."""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.catalog.recordfolder import folders_in
from snapmgr.contract.errors import SnapmgrError
from snapmgr.doctor.facts import FileFacts
from snapmgr.system.files import BEGUN, is_abandoned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.catalog.manifest import Lease
    from snapmgr.catalog.recordfolder import Damaged
    from snapmgr.catalog.store import Catalog
    from snapmgr.contract.records import Mount

# The names that `snapmgr.verify.run`, `prepare` and `attach` use in the scratch directory.
_RUN_FOLDER = re.compile(r"v(?P<pid>[0-9]+)-[a-z0-9_]{8}")
_POINT = re.compile(r"[0-9a-f]{8}-[0-9a-f]{6}")
_CLONE_FOLDER = re.compile(r"c[0-9a-f]{16}")
# A younger mount point may belong to another state directory that is about to mount there.
_POINT_AGE_S = 3600.0


def stray_files(catalog: Catalog, known: set[str], damaged: list[Damaged]) -> Iterator[FileFacts]:
    """Find temporary files that were never renamed, then snapshot folders without a manifest."""
    known = known | {one.path.name for one in damaged}
    top = catalog.path / "snapshots"
    snapshots: list[str] = []
    with suppress(SnapmgrError):
        snapshots = sorted(folders_in(top)[0])
    folders = ("", "leases", "schedules", "restores", "inplace", "capacity")
    # Each is listed once, and by its name: there may be ten thousand.
    listed = {f"{top}/{name}": _names(f"{top}/{name}") for name in snapshots}
    for folder, names in chain(
        ((str(catalog.path / one), _names(catalog.path / one)) for one in folders), listed.items()
    ):
        for path in [Path(folder, name) for name in names if name.startswith(".")]:
            if is_abandoned(path) and path.is_file():
                what = "is a temporary file of a process that was killed"
                yield FileFacts(path=path, kind="temporary", problem=what)
    for snapshot_id, names in zip(snapshots, listed.values(), strict=True):
        if snapshot_id in known or "manifest.json" in names:
            continue
        if all(map(BEGUN.fullmatch, names)):
            yield FileFacts(path=top / snapshot_id, kind="empty", problem="is empty", snapshot_id=snapshot_id)
        else:
            path = top / snapshot_id / "manifest.json"
            yield FileFacts(path=path, kind="manifest", problem="is missing", snapshot_id=snapshot_id)


def _names(folder: str | Path) -> list[str]:
    with suppress(OSError):
        return sorted(os.listdir(folder))
    return []


def _unknown_server(folder: Path) -> FileFacts:
    """Return the facts about the folder of a clone's server that has no lease; the server may still be running."""
    option = f"--socket={folder}/s".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if option in (process / "cmdline").read_bytes().split(b"\0"):
                what = f"belongs to a clone's server (pid {process.name}) that is running without a lease"
                return FileFacts(path=folder, kind="foreign", problem=what)
    return FileFacts(path=folder, kind="scratch", problem="belongs to a clone's server that has no lease")


def scratch_files(scratch: Path, leases: list[Lease], mounts: tuple[Mount, ...]) -> Iterator[FileFacts]:
    """Find folders in the scratch directory of killed servers on clones, and mount points without a lease."""
    servers = {lease.server.folder for lease in leases if lease.server is not None}
    points = {lease.point for lease in leases} | {mount.point for mount in mounts}
    with suppress(OSError):
        private = not scratch.stat().st_mode & 0o022
        for path in sorted(scratch.absolute().iterdir()):
            if path.is_symlink() or not path.is_dir():
                continue
            run, clone = _RUN_FOLDER.fullmatch(path.name), _CLONE_FOLDER.fullmatch(path.name)
            # The folder of a server on a clone is owned by the server's user.
            if path.stat().st_uid != os.geteuid() and not ((run or clone) and private):
                continue
            if clone and str(path) not in servers and time.time() - path.stat().st_mtime > _POINT_AGE_S:
                yield _unknown_server(path)
            elif run is not None and not Path("/proc", run["pid"]).exists():
                yield FileFacts(path=path, kind="scratch", problem="belongs to a killed server on a clone")
            elif (
                _POINT.fullmatch(path.name)
                and {str(path), os.path.realpath(path)}.isdisjoint(points)
                and time.time() - path.stat().st_mtime > _POINT_AGE_S
                and not any(path.iterdir())
            ):
                yield FileFacts(path=path, kind="empty", problem="is a mount point without a lease")
