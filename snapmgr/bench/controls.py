"""The controls: file systems that have no snapshots, made on a blank device to compare with."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, cast

from snapmgr.api import Provisioned, StorageMaker, release_cut, unmount_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.api import Mounter, ProvisionOrder, Runner

_FOLDER = "volume"
_MOUNT = ("rw", "relatime", "nodiscard")
_ALLOWED = {"file_system": ("ext4", "xfs"), "mount_options": None}
# A full file system would be measured for being full.
_SHARE = 0.9


class Controls:
    """A `snapmgr.api.Provisioner` for ext4 and XFS; options: ``file_system``, ``mount_options`` (with commas)."""

    def __init__(self, runner: Runner, mounter: Mounter) -> None:
        self._runner = runner
        self._mounter = mounter

    @contextmanager
    def provision(self, device: str, order: ProvisionOrder) -> Iterator[Provisioned]:
        """Make the file system and mount it; see `snapmgr.api.Provisioner`."""
        maker = StorageMaker(self._runner, self._mounter, order)
        options = maker.options(_ALLOWED)
        fs_type = cast("Literal['ext4', 'xfs']", options.get("file_system", "ext4"))
        further = tuple(filter(None, options.get("mount_options", "").split(",")))
        try:
            maker.discard(device)
            maker.make_file_system(fs_type, device, order.size_bytes)
            mount_options = maker.mount(device, fs_type, (*_MOUNT, *further))
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
        finally:
            self.unprovision(device, order)

    def unprovision(self, device: str, order: ProvisionOrder) -> None:
        """Take it down; see `snapmgr.api.Provisioner`."""
        unmount_all(self._runner, self._mounter, order)
        release_cut(self._runner, device, order)
