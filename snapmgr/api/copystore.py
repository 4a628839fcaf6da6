"""All of `snapmgr.copystore` that a storage plugin may import: the kit for backends that copy folders."""

from __future__ import annotations

from snapmgr.copystore.backend import CopyStoreBackend, Origin
from snapmgr.copystore.cloning import clone_beside
from snapmgr.copystore.copyfolder import DATA, CopyFolder, Folder, Mark, Store, read, write
from snapmgr.copystore.copying import FolderCopy, OpenFolder
from snapmgr.copystore.durability import flush
from snapmgr.copystore.place import unsuitable
from snapmgr.tree.entries import Entry, entries, subfolder
from snapmgr.tree.walk import FOLDER_FLAGS, reach

__all__ = [
    "DATA",
    "FOLDER_FLAGS",
    "CopyFolder",
    "CopyStoreBackend",
    "Entry",
    "Folder",
    "FolderCopy",
    "Mark",
    "OpenFolder",
    "Origin",
    "Store",
    "clone_beside",
    "entries",
    "flush",
    "reach",
    "read",
    "subfolder",
    "unsuitable",
    "write",
]
