"""Finds the backend that holds a folder and can clone it, to prepare a backup that belongs to no job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapmgr.config.plugins import list_plugins
from snapmgr.contract.abilities import FolderCloning
from snapmgr.contract.errors import ConfigError, SnapmgrError
from snapmgr.contract.records import NotMine
from snapmgr.system.blockdev import find_target

if TYPE_CHECKING:
    from snapmgr.context import Context
    from snapmgr.contract.backend import Backend


def find_cloner(ctx: Context, folder: str) -> Backend | None:
    """Return the backend that can clone `folder` in its storage, or None.

    Warns about a backend that could do it if its requirements were met here, or that cannot examine the folder. Raises
    ConfigError for a wrong table of a backend.
    """
    target = find_target(folder, runner=ctx.runner)
    for plugin in list_plugins():
        if plugin.backend is None or not _can_clone(plugin.backend):
            continue
        backend = ctx.unchecked_backend(plugin.name)
        try:
            found = backend.locate(target)
        except ConfigError:
            raise
        except SnapmgrError as error:
            ctx.tell(f"warning: {plugin.name} cannot examine {folder}: {error.message}")
            continue
        if isinstance(found, NotMine):
            continue
        missing = backend.missing()
        if not missing:
            return backend
        ctx.tell(f"warning: {plugin.name} cannot clone {folder}: {'; '.join(reason.what for reason in missing)}")
    return None


def _can_clone(backend: type[Backend]) -> bool:
    return callable(getattr(backend, FolderCloning.clone_folder.__name__, None))
