"""LUKS containers on attachments: what is on the logical volume itself when its file system is encrypted."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from snapmgr.api import CommandError, LackingError, StorageError
from snapmgr_lvm import dm, marks

if TYPE_CHECKING:
    from snapmgr.api import Mounter, Runner
    from snapmgr_lvm.dm import Device

FS_TYPE = "crypto_LUKS"
"""What blkid calls a container."""
# Deriving the key may take seconds, by design; on a loaded machine longer.
_OPEN_TIMEOUT_S = 180.0
_CLOSE_TIMEOUT_S = 60.0
_NO_KEY = 2  # cryptsetup(8): "no permission (bad passphrase)"


def open_container(runner: Runner, device: str, record_id: str, key_file: str | None) -> str:
    """Open the container on an attachment's device and return the device of what is in it.

    Raises LackingError without a key file, StorageError if the key does not fit or cryptsetup fails.
    """
    if key_file is None:
        raise LackingError(
            f"there is a LUKS container on {device}, and no key for it",
            hint="set luks_key_file in [backend.lvm]: a file that only root can read, added by cryptsetup luksAddKey",
        )
    if not os.access(key_file, os.R_OK):
        raise LackingError(f"the LUKS key file {key_file} is not there, or cannot be read", hint="see luks_key_file")
    argv = ["setpriv", "--pdeathsig", "KILL", "--", "cryptsetup", "open", "--type", "luks", "--batch-mode"]
    try:
        opened = runner.run(
            [*argv, "--key-file", key_file, device, container_name(record_id)],
            ok=(0, _NO_KEY),
            timeout_s=_OPEN_TIMEOUT_S,
            env=dm.NO_UDEV,
        )
    except CommandError as error:
        raise StorageError(f"cannot open the LUKS container on {device}: {error.message}") from None
    if opened.returncode == _NO_KEY:
        raise StorageError(
            f"the key in {key_file} does not open the LUKS container on {device}",
            hint=f"was it added to the origin? cryptsetup luksAddKey ORIGIN {key_file}, before the snapshot is taken",
        )
    made = find_container(runner, record_id)
    if made is None:
        raise StorageError(f"the LUKS container on {device} was opened and is not there")
    return dm.node(runner, made)


def close_container(runner: Runner, mounter: Mounter, record_id: str) -> None:
    """Close what `open_container` opened; idempotent. Raises InUseError if it is in use, StorageError otherwise."""
    container = find_container(runner, record_id)
    if container is None:
        return
    dm.require_unmounted(container, mounter.mounts())
    argv = ["setpriv", "--pdeathsig", "KILL", "--", "cryptsetup", "close", container.name]
    try:
        runner.run(argv, timeout_s=_CLOSE_TIMEOUT_S, env=dm.NO_UDEV)
    except CommandError:
        # Half-made, or busy: the latter is told with names.
        there = find_container(runner, record_id)
        if there is not None:
            dm.remove(runner, there)


def find_container(runner: Runner, record_id: str) -> Device | None:
    """Return the open container of an attachment."""
    name = container_name(record_id)
    # libcryptsetup: "CRYPT-LUKS2-" and the container's UUID, then the name.
    return next((one for one in dm.devices(runner) if one.name == name and one.uuid.startswith("CRYPT-LUKS")), None)


def container_name(record_id: str) -> str:
    """Return the name of an attachment's open container."""
    return f"{marks.attachment_name(record_id)}.luks"
