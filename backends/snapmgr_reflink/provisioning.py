"""An XFS that shares blocks, made anew on a blank device: see `snapmgr.api.Provisioner`."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from snapmgr.api import Provisioned, StorageMaker, release_cut, unmount_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.api import Mounter, ProvisionOrder, Runner

_FOLDER = "volume"
_MOUNT = ("rw", "relatime", "nodiscard")
_ALLOWED = {"file_system": ("xfs",), "mount_options": None}
# What the origin may fill, so that a copy of all of it still fits.
_SHARE = 0.45


@contextmanager
def provision(runner: Runner, mounter: Mounter, device: str, order: ProvisionOrder) -> Iterator[Provisioned]:
    """Make it and mount it; the path is a folder in it, beside which the copies are kept."""
    maker = StorageMaker(runner, mounter, order)
    further = tuple(filter(None, maker.options(_ALLOWED).get("mount_options", "").split(",")))
    maker.discard(device)
    maker.make_file_system("xfs", device, order.size_bytes)
    mount_options = maker.mount(device, "xfs", (*_MOUNT, *further))
    path = os.path.join(order.point, _FOLDER)
    maker.run("mkdir", path)
    room = os.statvfs(path)
    yield Provisioned(
        path=path,
        devices=(device,),
        capacity_bytes=int(room.f_bavail * room.f_frsize * _SHARE),
        commands=maker.commands,
        mount_options=mount_options,
    )


def unprovision(runner: Runner, mounter: Mounter, device: str, order: ProvisionOrder) -> None:
    """Unmount it, and detach what mkfs was given instead of the whole device."""
    unmount_all(runner, mounter, order)
    release_cut(runner, device, order)
