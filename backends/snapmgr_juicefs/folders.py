"""Clones whole folders, hard links and all: `snapmgr.api.FolderCloning`."""

from __future__ import annotations

import hashlib
import os
from typing import TYPE_CHECKING

from snapmgr.api import Mount, NotFoundError, StorageError
from snapmgr_juicefs import client as clients
from snapmgr_juicefs import tree
from snapmgr_juicefs.tree import shown

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr_juicefs.program import Juicefs


def clone(source: str, target: str, program: Juicefs) -> None:
    """Flush `source`, clone it to `target` and complete the clone. Raises StorageError.

    Both are paths in the client's own mount. A failure may leave a `target`.
    """
    try:
        source_fd = os.open(source, tree.FOLDER_FLAGS)
        try:
            seen = tree.flush(source_fd, source)
        finally:
            os.close(source_fd)
        program.clone(source, target)
        with tree.folder(target) as target_fd:
            tree.complete(target_fd, seen, source)
    except OSError as error:
        raise StorageError(f"cannot clone {shown(source)}: {error.strerror}") from error


def clone_folder(source: str, target: str, mounts: Sequence[Mount], program: Juicefs) -> None:
    """Clone a folder to a path that does not exist; see `snapmgr.api.FolderCloning`.

    It is made beside `target`, under a name that is always the same for that, and renamed when it is whole.
    """
    if not os.path.isdir(source):
        raise NotFoundError(f"there is no folder {shown(source)}", hint="is the volume mounted?")
    parent = os.path.realpath(os.path.dirname(target.rstrip("/")) or ".")
    name = os.path.basename(target.rstrip("/"))
    real = os.path.realpath(source)
    own = clients.own_mount(real, mounts)
    if own is None or clients.own_mount(parent, mounts) != own:
        raise StorageError(
            f"{shown(source)} and {shown(parent)} are not in one mount of a JuiceFS volume",
            hint="name a folder in the same mount",
        )
    source_path, folder = clients.translate(real, mounts, own), clients.translate(parent, mounts, own)
    if clients.lies_in(folder, source_path):
        raise StorageError(f"{shown(target)} lies inside {shown(source)}", hint="name a folder outside of it")
    if os.path.lexists(os.path.join(folder, name)):
        raise StorageError(f"{shown(target)} exists already", hint="name another one")
    begun = os.path.join(folder, f".snapmgr-clone-{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}")
    program.remove(begun, skip_trash=os.geteuid() == 0)
    try:
        clone(source_path, begun, program)
        with tree.folder(folder) as folder_fd:
            tree.rename_new(os.path.basename(begun), name, folder_fd, folder_fd)
            os.fsync(folder_fd)
    except BaseException as error:
        program.remove(begun, skip_trash=os.geteuid() == 0)
        if isinstance(error, OSError):
            why = "it exists already" if isinstance(error, FileExistsError) else error.strerror
            raise StorageError(f"cannot clone {shown(source)} to {shown(target)}: {why}") from error
        raise
