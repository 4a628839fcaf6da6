"""To whom a backup's files belong."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def give_owner(folder: Path, uid: int, gid: int) -> None:
    """Let all in `folder` belong to a server's user, as a datadir does: the tool writes it as who runs us.

    Symlinks are not followed. Without the right to it the files stay ours.
    """
    if os.geteuid() != 0:
        return
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            os.chown(os.path.join(parent, name), uid, gid, follow_symlinks=False)
    os.chown(folder, uid, gid)
