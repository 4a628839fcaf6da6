"""Measures a snapshot's cost: cheaply from quota groups, exactly by finding every owner of each extent."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from snapmgr_btrfs import kernel

if TYPE_CHECKING:
    from pathlib import Path


def quota_exclusive(folder: Path, subvolume_id: int) -> int | None:
    """Given /sys/fs/btrfs/UUID, return the quota group's exclusive bytes (data and metadata); None if not known.

    Simple quotas ("squota") charge a block to its first writer, which does not tell what a deletion frees.
    """
    groups = folder / "qgroups"
    try:
        if (groups / "inconsistent").read_text().strip() != "0":
            return None
        mode = groups / "mode"  # Linux 6.7
        if mode.exists() and mode.read_text().strip() != "qgroup":
            return None
        return int((groups / f"0_{subvolume_id}" / "exclusive").read_text())
    except (OSError, ValueError):
        return None


def exact_exclusive(fd: int, subvolume_id: int) -> int:
    """Return the bytes on disk of all extents that nothing but this subvolume refers to.

    A compressed extent counts with its size on disk, one that is only partly referred to counts whole: that is what a
    deletion frees. Extents shared among files of the snapshot only are its own. Metadata (a fraction of a percent for
    database files) is not counted. One tree search per 256 KiB of items and one look-up per extent. Raises OSError.
    """
    sizes = dict(kernel.data_extents(fd, subvolume_id))
    own = frozenset({subvolume_id})
    total = 0
    for address, size in sizes.items():
        try:
            if kernel.extent_owners(fd, address) <= own:
                total += size
        except OSError as error:
            if error.errno != errno.ENOENT:  # gone since: the subvolume was deleted meanwhile
                raise
    return total
