"""Attaches a copy as an overlay: a command pays only for what it changes, unlike with a clone of each file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from snapmgr.contract.errors import SnapmgrError
from snapmgr.contract.records import Attachment
from snapmgr.tree.overlay import overlay_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.contract.backend import Mounter
    from snapmgr.contract.records import Mount
    from snapmgr.copystore.copyfolder import CopyFolder

_TYPE = "overlay"
_TRIAL = "trial"
# As much like a clone as possible: a file that is changed is whole, and hard links stay together. Nobody needs the
# changes after a power cut; without "volatile" the unmounting would flush the whole file system.
_OPTIONS = ("redirect_dir=on", "metacopy=off", "index=on", "volatile")


def overlaid(parent: CopyFolder, folder: CopyFolder, mounter: Mounter) -> Attachment | None:
    """Return an overlay over the copy in `parent` with its changes in `folder`; None if it cannot be mounted here.

    The kernel clones a file when it is changed. `detach` removes the changes with the rest of `folder`.
    """
    trial = os.path.join(folder.path, _TRIAL)
    try:
        os.mkdir(_TRIAL, 0o700, dir_fd=folder.fd)
        # In other folders: those of a "volatile" mount cannot be mounted again.
        with mounter.private(folder.name, _TYPE, (*overlay_options(parent.data, trial), *_OPTIONS)):
            pass
        return Attachment(
            # The source is only a name: it shows in the table of mounts whose overlay this is.
            device=folder.name,
            fs_type=_TYPE,
            options=(*overlay_options(parent.data, folder.path), *_OPTIONS),
        )
    except (SnapmgrError, OSError):
        return None


def overlay_point(folder: CopyFolder, mounts: Sequence[Mount]) -> str | None:
    """Return where the overlay is mounted whose changes are in `folder`."""
    return next((one.point for one in mounts if (one.fs_type, one.source) == (_TYPE, folder.name)), None)
