"""Makes a volume group on a blank device, with an origin and its file system: see `snapmgr.api.Provisioner`.

Classic: the origin is three quarters of the group, and the rest is for snapshots. Thin: a pool takes all of it. The
group's name belongs to the order alone: everything with that name may be removed.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.api import CommandError, SnapmgrError, StorageError, format_size, unmake
from snapmgr_lvm import dm

if TYPE_CHECKING:
    from snapmgr.api import Mounter, Provisioned, ProvisionOrder, Runner, StorageMaker
    from snapmgr_lvm.scratch import Scratch

_ORIGIN = "origin"
_POOL = "pool"
_ALLOWED = {"file_system": ("ext4", "xfs"), "thin": ("no", "yes"), "prefilled": ("no", "yes")}
_MIB = 1 << 20
# XFS needs 300 MiB, and gets less than half of a thin pool.
_LEAST_BYTES = 512 * _MIB
_LEAST_THIN_XFS_BYTES = 768 * _MIB
_EXTENT_BYTES = 4 * _MIB
# thin_metadata_size(8): 64 bytes per chunk of 64 KiB are a thousandth; twice that leaves room for many snapshots.
_METADATA_SHARE = 1 / 500
_LEAST_METADATA_BYTES = 16 * _MIB
# Share of the pool: the origin and a full copy of it fit.
_THIN_SHARE = 0.45
# A quarter of the group holds a third of the other three quarters, minus the table's own records.
_CLASSIC_SHARE = 0.3
_FILE_SYSTEM_SHARE = 0.9
_TIMEOUT_S = 1800.0
# LVM's exit code for a missing object.
_ABSENT = 5
_REMOVE_S = 20.0


def group_name(order: ProvisionOrder) -> str:
    """Return the name of an order's volume group."""
    return f"snapmgr_{order.id}"


def make(maker: StorageMaker) -> Provisioned:
    """Make it and mount it; the path is a folder on the origin."""
    order, device = maker.order, maker.device
    options = maker.options(_ALLOWED)
    fs_type = options.get("file_system", "ext4")
    thin = options.get("thin") == "yes"
    least_bytes = _LEAST_THIN_XFS_BYTES if thin and fs_type == "xfs" else _LEAST_BYTES
    if order.size_bytes < least_bytes:
        raise StorageError(
            f"{format_size(order.size_bytes)} are too little for LVM and {fs_type}",
            hint=f"{format_size(least_bytes)} is the least",
        )
    maker.discard()
    name = group_name(order)
    size = ("--setphysicalvolumesize", f"{order.size_bytes}b")
    # Forced twice: an unused group of an earlier run may be on it.
    maker.run("pvcreate", "--yes", "--force", "--force", "--zero", "y", "--dataalignment", "1m", *size, device)
    maker.run("vgcreate", "--yes", "--physicalextentsize", "4m", name, device)
    origin_bytes = _make_thin(maker, order) if thin else _make_classic(maker, order)
    origin = f"/dev/{name}/{_ORIGIN}"
    if options.get("prefilled") == "yes":
        argv = ("dd", "if=/dev/zero", f"of={origin}", "bs=4M", f"count={origin_bytes // _EXTENT_BYTES}", "oflag=direct")
        maker.run(*argv, timeout_s=None)
    maker.make_folder(fs_type, origin, origin_bytes)
    available = maker.free_bytes() * _FILE_SYSTEM_SHARE
    return maker.made(maker.path, capacity_bytes=available if thin else min(available, origin_bytes * _CLASSIC_SHARE))


def _make_classic(maker: StorageMaker, order: ProvisionOrder) -> int:
    """Make the origin and return its size."""
    extents = _extents(maker, order) * 3 // 4
    made = ("lvcreate", "--yes", "--wipesignatures", "y", "--zero", "y", "--type", "linear")
    maker.run(*made, "--extents", str(extents), "--name", _ORIGIN, group_name(order))
    return extents * _EXTENT_BYTES


def _make_thin(maker: StorageMaker, order: ProvisionOrder) -> int:
    """Make pool and origin, and return the origin's size."""
    extents, name = _extents(maker, order), group_name(order)
    metadata_bytes = max(int(order.size_bytes * _METADATA_SHARE), _LEAST_METADATA_BYTES)
    # The limit of dm-thin (Documentation/admin-guide/device-mapper/thin-provisioning.rst).
    metadata = -(-min(metadata_bytes, 15 << 30) // _EXTENT_BYTES)
    # LVM keeps a spare of the same size, for repairs.
    data = extents - 2 * metadata
    maker.run(
        *("lvcreate", "--yes", "--type", "thin-pool", "--chunksize", "64k", "--zero", "y"),
        # On a loop device a passed-down discard would punch holes into its file.
        *("--discards", "nopassdown", "--poolmetadatasize", f"{metadata * _EXTENT_BYTES}b"),
        *("--extents", str(data), "--name", _POOL, name),
        timeout_s=_TIMEOUT_S,
    )
    size_bytes = int(data * _THIN_SHARE) * _EXTENT_BYTES
    thin = ("lvcreate", "--yes", "--type", "thin", "--thinpool", _POOL)
    maker.run(*thin, "--virtualsize", f"{size_bytes}b", "--name", _ORIGIN, name)
    return size_bytes


def _extents(maker: StorageMaker, order: ProvisionOrder) -> int:
    return int(maker.run("vgs", "--noheadings", "--options", "vg_free_count", group_name(order)).stdout)


def unprovision(runner: Runner, mounter: Mounter, scratch: Scratch, device: str, order: ProvisionOrder) -> None:
    """Take down everything with the order's name, finished or not, and the attachments of its snapshots."""
    name = group_name(order)
    # A killed command of LVM may have left the origin suspended: unmounting would hang.
    for volume in _devices(name):
        if volume.suspended:
            with suppress(CommandError):
                runner.run(["dmsetup", "resume", volume.name])
    unmake(runner, mounter, device, order)
    found = runner.run(["vgs", "--noheadings", "--options", "vg_uuid", name], ok=(0, _ABSENT))
    if found.returncode == 0:
        scratch.clear_group(found.stdout.strip())
        with suppress(CommandError):
            # The order decides about discards, not lvm.conf.
            kept = ("--config", "devices/issue_discards=0")
            runner.run(["vgremove", "--yes", "--force", *kept, name], timeout_s=_TIMEOUT_S)
    _remove_devices(name)
    _forget_nodes(name)


def _devices(name: str) -> tuple[dm.Device, ...]:
    return dm.devices(f"{name}-")


def _remove_devices(name: str) -> None:
    """Remove the group's devices, upper ones first. Raises StorageError if one stays in use."""
    deadline = time.monotonic() + _REMOVE_S
    while devices := _devices(name):
        failure: SnapmgrError | None = None
        held = {kernel_name for device in devices for kernel_name in device.below}
        for device in devices:
            if device.kernel_name in held:
                continue
            try:
                dm.remove(device)
            except SnapmgrError as error:
                failure = error
        if failure is not None and time.monotonic() > deadline:
            raise StorageError(f"cannot take down the volume group {name}: {failure.message}", hint=failure.hint)


def _forget_nodes(name: str) -> None:
    """Remove the links to devices that are gone, because without udev no other program does."""
    folder = Path("/dev", name)
    with suppress(OSError):
        for link in folder.iterdir():
            if link.is_symlink() and not link.exists():
                link.unlink()
        folder.rmdir()
