"""A btrfs made anew on a blank device: see `snapmgr.api.Provisioner`."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from snapmgr.api import Provisioned, StorageMaker, unmount_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.api import Mounter, ProvisionOrder, Runner

_VOLUME = "volume"
# Without discards: on a loop device they would punch holes into its file, and other file systems do none by default.
_MOUNT = ("rw", "relatime", "nodiscard", "space_cache=v2")
# What the origin may fill, so that a copy of all of it still fits, and btrfs keeps room for its metadata.
_SHARE = 0.45
_ALLOWED = {"nocow": ("no", "yes"), "mount_options": None}


@contextmanager
def provision(runner: Runner, mounter: Mounter, device: str, order: ProvisionOrder) -> Iterator[Provisioned]:
    """Make it and mount its top; the path is a subvolume, with ``nocow`` one whose files have no copy-on-write."""
    maker = StorageMaker(runner, mounter, order)
    options = maker.options(_ALLOWED)
    maker.discard(device)
    maker.make_file_system("btrfs", device, order.size_bytes)
    further = tuple(filter(None, options.get("mount_options", "").split(",")))
    mount_options = maker.mount(device, "btrfs", (*_MOUNT, *further))
    path = os.path.join(order.point, _VOLUME)
    maker.run("btrfs", "--quiet", "subvolume", "create", path)
    if options.get("nocow") == "yes":
        maker.run("chattr", "+C", path)
    room = os.statvfs(path)
    yield Provisioned(
        path=path,
        devices=(device,),
        capacity_bytes=int(room.f_bavail * room.f_frsize * _SHARE),
        commands=maker.commands,
        mount_options=mount_options,
    )


def unprovision(runner: Runner, mounter: Mounter, order: ProvisionOrder) -> None:
    """Unmount it."""
    unmount_all(runner, mounter, order)
