"""Which backend holds a folder and can clone it: for what is prepared without a job."""

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
    """Return the backend that can clone `folder` in its storage; None if there is none.

    What a backend lacks on this machine, or cannot do with the folder, goes to `ctx.tell` only if it would have been
    the one. Raises ConfigError for a wrong table of a backend.
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
            ctx.tell(f"warning: {plugin.name} cannot look at {folder}: {error.message}")
            continue
        if isinstance(found, NotMine):
            continue
        lacking = backend.missing()
        if not lacking:
            return backend
        ctx.tell(f"warning: {plugin.name} cannot clone {folder}: {'; '.join(one.what for one in lacking)}")
    return None


def _can_clone(backend: type[Backend]) -> bool:
    return callable(getattr(backend, FolderCloning.clone_folder.__name__, None))
