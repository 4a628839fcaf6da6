"""Makes a volume on a blank device: ext4 with the objects, the metadata (SQLite) and the client's cache, and a mount.

See `snapmgr.api.Provisioner`. The volume reads and writes only this device, which takes the place of a remote object
store: a benchmark compares the client's handling of the load, without a network.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr import api
from snapmgr.api import StorageError
from snapmgr_juicefs import client

if TYPE_CHECKING:
    from snapmgr.api import Mounter, Provisioned, ProvisionOrder, Runner, StorageMaker

# Share that the origin may fill: overwriting creates new objects, and compaction writes them once more.
_SHARE = 0.3
_CACHE_SHARE = 0.1
_LEAST_BYTES = 256 << 20
_MOUNT_S = 120.0
# After its unmount a client flushes, writes its metadata and ends.
_END_S = 5.0
_KILLED_S = 10.0


def make(maker: StorageMaker, program: str) -> Provisioned:
    """Make the file system and the volume, mount both; the path is a folder of the volume."""
    order = maker.order
    options = maker.options({"block_size": None})
    if order.size_bytes < _LEAST_BYTES:
        raise StorageError(f"{order.size_bytes >> 20} MiB are too little for a JuiceFS volume", hint="256 MiB will do")
    maker.discard()
    maker.make_file_system("ext4", maker.device, order.size_bytes)
    maker.mount(maker.device, "ext4", as_ordered=False)
    base = order.point
    url, point = f"sqlite3://{base}/meta.db", f"{base}/mnt"
    for folder in ("objects", "cache", "mnt"):
        os.mkdir(os.path.join(base, folder), 0o700)
    free_bytes = maker.free_bytes()
    block = ("--block-size", options.get("block_size", "4M"))
    # Without a trash a deletion frees the space.
    store = ("--storage", "file", "--bucket", f"{base}/objects/", "--trash-days", "0", *block)
    maker.run(program, "--no-agent", "format", *store, url, f"bench-{order.id}", timeout_s=_MOUNT_S)
    cache = ("--cache-dir", f"{base}/cache", "--cache-size", f"{int(free_bytes * _CACHE_SHARE) >> 20}M")
    quiet = ("--background", "--no-usage-report", "--no-syslog", "--backup-meta", "0", "--log", f"{base}/client.log")
    further = options.get("mount_options", "").split()
    # The address first: a client's command line shows its first 250 bytes, and private mounts find the metadata there.
    maker.run(program, "--no-agent", "mount", url, point, *quiet, *cache, *further, timeout_s=_MOUNT_S)
    path = f"{point}/volume"
    cache_dirs = client.recognise(maker.mounted(path)).read_dirs()
    maker.run("mkdir", path)
    return maker.made(path, capacity_bytes=free_bytes * _SHARE, cache_dirs=cache_dirs)


def unmake(runner: Runner, mounter: Mounter, device: str, order: ProvisionOrder) -> None:
    """Unmount the volume, end its client, and unmount the file system below."""
    _end_client(runner, mounter, order)
    api.unmake(runner, mounter, device, order)


def _end_client(runner: Runner, mounter: Mounter, order: ProvisionOrder) -> None:
    """Unmount the volume, and wait for its client to end, or end it."""
    base = os.path.realpath(order.point)
    point = f"{base}/mnt"
    while any(mount.point == point for mount in mounter.mounts()):
        runner.run(["umount", point], timeout_s=_MOUNT_S)
    deadline = time.monotonic() + _END_S
    while (clients := _clients(base)) and time.monotonic() < deadline + _KILLED_S:
        if time.monotonic() > deadline:
            for pid in clients:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _clients(base: str) -> list[int]:
    """Return the processes of juicefs that have a file open in the folder `base`."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "comm").read_text().strip() == "juicefs" and any(
                _target(link).startswith(f"{base}/") for link in (process / "fd").iterdir()
            ):
                found.append(int(process.name))
    return found


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""
