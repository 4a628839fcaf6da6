"""All of `snapmgr.system` that a storage plugin may import: system calls, facts of this boot, paths and mounts."""

from __future__ import annotations

from snapmgr.system.boot import boot_id, machine_id
from snapmgr.system.filesystem import FileSystem, identify
from snapmgr.system.kernel import (
    Extent,
    clone_file,
    count_extents,
    extents,
    flags_of,
    generation,
    is_nocow,
    open_beneath,
    rename_new,
    set_flags,
    set_nocow,
    sync_file_system,
    try_clone_file,
)
from snapmgr.system.loopdevice import Loop, attach_loop, loops, release_loop
from snapmgr.system.mountapi import may_mount
from snapmgr.system.paths import holder, lies_in, mounted_inside, shown

__all__ = [
    "Extent",
    "FileSystem",
    "Loop",
    "attach_loop",
    "boot_id",
    "clone_file",
    "count_extents",
    "extents",
    "flags_of",
    "generation",
    "holder",
    "identify",
    "is_nocow",
    "lies_in",
    "loops",
    "machine_id",
    "may_mount",
    "mounted_inside",
    "open_beneath",
    "release_loop",
    "rename_new",
    "set_flags",
    "set_nocow",
    "shown",
    "sync_file_system",
    "try_clone_file",
]
