"""Decides whether a folder can be the store for the copies of a directory."""

from __future__ import annotations

import os

from snapmgr.system.paths import lies_in, shown


def unsuitable(store: str, path: str) -> str | None:
    """Return why the folder `store` cannot hold the copies of the directory `path`; None if it can. Real paths."""
    try:
        store.encode()
    except UnicodeEncodeError:
        # Manifests hold this path, and they are UTF-8.
        return f"the store {shown(store)} has a name that is not UTF-8"
    if lies_in(path, store):
        return f"{shown(path)} lies inside the store {shown(store)}"
    if lies_in(store, path):
        return f"the store {shown(store)} lies inside {shown(path)}"
    return None


def unwritable(store: str) -> str | None:
    """Return why the folder `store` cannot be used or created by this user; None if it can."""
    if os.path.isdir(store):
        return f"the store {shown(store)} belongs to another user" if os.stat(store).st_uid != os.geteuid() else None
    if os.path.lexists(store):
        return f"the store {shown(store)} is not a folder"
    if not os.access(os.path.dirname(store), os.W_OK | os.X_OK):
        return f"the store {shown(store)} does not exist and cannot be created"
    return None
