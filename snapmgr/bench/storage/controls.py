"""Makes the controls: file systems without snapshots, on a blank device, for comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapmgr.api import StorageMaker, provisioned, unmake

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from snapmgr.api import Mounter, Provisioned, ProvisionOrder, Runner

# A full file system would be measured for being full.
_SHARE = 0.9


class Controls:
    """A `snapmgr.api.Provisioner` for ext4 and XFS; options: ``file_system``, ``mount_options`` (with commas)."""

    def __init__(self, runner: Runner, mounter: Mounter) -> None:
        self._runner = runner
        self._mounter = mounter

    def provision(self, device: str, order: ProvisionOrder) -> AbstractContextManager[Provisioned]:
        """Make the file system and mount it; see `snapmgr.api.Provisioner`."""
        maker = StorageMaker(self._runner, self._mounter, device, order)
        return provisioned(self, device, order, lambda: _make(maker))

    def unprovision(self, device: str, order: ProvisionOrder) -> None:
        """Take it down; see `snapmgr.api.Provisioner`."""
        unmake(self._runner, self._mounter, device, order)


def _make(maker: StorageMaker) -> Provisioned:
    fs_type = maker.options({"file_system": ("ext4", "xfs")}).get("file_system", "ext4")
    maker.discard()
    maker.make_folder(fs_type, maker.device, maker.order.size_bytes)
    return maker.made(maker.path, capacity_bytes=maker.free_bytes() * _SHARE)
