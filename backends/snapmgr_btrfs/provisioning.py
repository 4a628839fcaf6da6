"""Makes a btrfs on a blank device: see `snapmgr.api.Provisioner`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snapmgr.api import Provisioned, StorageMaker

# The share that the origin may fill: a copy of all of it still fits, and btrfs keeps room for its metadata.
_SHARE = 0.45


def make(maker: StorageMaker) -> Provisioned:
    """Make it and mount its top; the path is a subvolume, with ``nocow`` one whose files have no copy-on-write."""
    options = maker.options({"nocow": ("no", "yes")})
    maker.discard()
    maker.make_file_system("btrfs", maker.device, maker.order.size_bytes)
    maker.mount(maker.device, "btrfs", "space_cache=v2")
    maker.run("btrfs", "--quiet", "subvolume", "create", maker.path)
    if options.get("nocow") == "yes":
        maker.run("chattr", "+C", maker.path)
    return maker.made(maker.path, capacity_bytes=maker.free_bytes() * _SHARE)
