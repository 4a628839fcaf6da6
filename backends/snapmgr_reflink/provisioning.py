"""An XFS that shares blocks, made anew on a blank device: see `snapmgr.api.Provisioner`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snapmgr.api import Provisioned, StorageMaker

# What the origin may fill, so that a copy of all of it still fits.
_SHARE = 0.45


def make(maker: StorageMaker) -> Provisioned:
    """Make it and mount it; the path is a folder in it, beside which the copies are kept."""
    maker.options({"file_system": ("xfs",)})
    maker.discard()
    maker.make_folder("xfs", maker.device, maker.order.size_bytes)
    return maker.made(maker.path, capacity_bytes=maker.free_bytes() * _SHARE)
