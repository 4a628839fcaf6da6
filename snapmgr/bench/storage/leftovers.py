"""Removes leftovers of killed runs, before a device is checked for other users."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from snapmgr.bench.device.blank import refused_exclusively
from snapmgr.bench.storage.contributed import all_stacks
from snapmgr.bench.storage.scene import sweep
from snapmgr.bench.storage.stacks import backend_of, provisioner_of
from snapmgr.contract.errors import StorageError
from snapmgr.system.mount import KernelMounter

if TYPE_CHECKING:
    from snapmgr.contract.abilities import Provisioner
    from snapmgr.contract.backend import Runner

# The next user of the device reports a longer use.
_RELEASE_S = 10.0


def clear_leftovers(runner: Runner) -> tuple[str, ...]:
    """Remove the leftovers of runs that were killed with their guards, and return their devices.

    Their storages hold the device (mounts of a surviving process, logical volumes), which would be refused as in use.
    Raises StorageError if something cannot be removed.
    """
    devices = sweep(lambda name: restored(name, runner))
    # The mounts of a namespace disappear a moment after its last process.
    deadline = time.monotonic() + _RELEASE_S
    while any(_held(device) for device in devices) and time.monotonic() < deadline:
        time.sleep(0.02)
    return devices


def _held(device: str) -> bool:
    return os.path.exists(device) and refused_exclusively(device) != ""


def restored(name: str, runner: Runner) -> Provisioner:
    """Given a backend's name ("" for the controls), return its provisioner to remove storages. Raises StorageError."""
    known = next((one for one in all_stacks().values() if (one.backend or "") == name), None)
    if known is None:
        raise StorageError(f"an earlier run used the backend {name!r}, which is not installed any more")
    mounter = KernelMounter()
    return provisioner_of(known, backend_of(known, {}, runner, mounter), runner, mounter)
