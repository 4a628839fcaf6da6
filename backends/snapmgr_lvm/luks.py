"""Opens LUKS containers on attachments: the logical volume holds one when its file system is encrypted.

It uses libcryptsetup instead of ``cryptsetup open``, because only the library can open a container privately. Otherwise
udev probes the contents, and /dev/disk/by-uuid leads there instead of to the origin's file system of the same UUID.
"""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

from snapmgr.api import MissingRequirementError, StorageError
from snapmgr_lvm import dm, marks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.api import Mounter
    from snapmgr_lvm.dm import Device

FS_TYPE = "crypto_LUKS"
"""blkid's name for a container."""

_LIBRARY = "libcryptsetup.so.12"
# libcryptsetup.h
_ANY_SLOT = -1
_ACTIVATE_PRIVATE = 1 << 4
_WHOLE_FILE = 0
_LOG_ERROR = 1
_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)


def open_container(device: str, record_id: str, key_file: str | None) -> str:
    """Open the container on an attachment's device and return the device of its content.

    Deriving the key may take seconds, by design. Raises MissingRequirementError without a key file, or without the
    library; StorageError if the key does not fit, or the container cannot be opened.
    """
    if key_file is None:
        raise MissingRequirementError(
            f"there is a LUKS container on {device}, and no key for it",
            hint="set luks_key_file in [backend.lvm]: a file that only root can read, added by cryptsetup luksAddKey",
        )
    if not os.access(key_file, os.R_OK):
        raise MissingRequirementError(
            f"the LUKS key file {key_file} is not there, or cannot be read", hint="see luks_key_file"
        )
    library, name = _load(), container_name(record_id)
    with _context(library, device) as (context, said):
        # No type: LUKS of either version.
        code = library.crypt_load(context, None, None)
        if code >= 0:
            code = library.crypt_activate_by_keyfile_device_offset(
                context,
                name.encode(),
                ctypes.c_int(_ANY_SLOT),
                os.fsencode(key_file),
                ctypes.c_size_t(_WHOLE_FILE),
                ctypes.c_uint64(0),
                ctypes.c_uint32(_ACTIVATE_PRIVATE),
            )
        if code == -errno.EPERM:
            raise StorageError(
                f"the key in {key_file} does not open the LUKS container on {device}",
                hint=f"was it added before the snapshot was taken? cryptsetup luksAddKey ORIGIN {key_file}",
            )
        if code < 0:
            raise StorageError(f"cannot open the LUKS container on {device}: {_why(code, said)}")
    made = find_container(record_id)
    if made is None:
        raise StorageError(f"the LUKS container on {device} was opened and is not there")
    return dm.node(made)


def close_container(mounter: Mounter, record_id: str) -> None:
    """Close what `open_container` opened; idempotent. Raises InUseError if it is in use, StorageError otherwise."""
    container = find_container(record_id)
    if container is None:
        return
    dm.require_unmounted(container, mounter.mounts())
    _load().crypt_deactivate_by_name(None, container.name.encode(), ctypes.c_uint32(0))
    # Half-made, or in use: only the latter is an error.
    left = find_container(record_id)
    if left is not None:
        dm.remove(left)


def find_container(record_id: str) -> Device | None:
    """Return the open container of an attachment."""
    found = dm.find_name(container_name(record_id))
    # libcryptsetup: "CRYPT-LUKS2-" and the container's UUID, then the name.
    return found if found is not None and found.uuid.startswith("CRYPT-LUKS") else None


def container_name(record_id: str) -> str:
    """Return the name of an attachment's open container."""
    return f"{marks.attachment_name(record_id)}.luks"


def _load() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError:
        raise MissingRequirementError(f"{_LIBRARY} is not installed", hint="apt-get install cryptsetup-bin") from None


@contextmanager
def _context(library: ctypes.CDLL, device: str) -> Iterator[tuple[ctypes.c_void_p, list[str]]]:
    """Yield the library's context of a device, and the list that collects its error messages."""
    said: list[str] = []

    def log(level: int, text: bytes, _: object) -> None:
        if level == _LOG_ERROR:
            said.append(text.decode("utf-8", "replace").strip())

    callback, context = _LOG(log), ctypes.c_void_p()
    code = library.crypt_init(ctypes.byref(context), device.encode())
    if code < 0:
        raise StorageError(f"cannot look at the LUKS container on {device}: {_why(code, said)}")
    try:
        library.crypt_set_log_callback(context, callback, None)
        yield context, said
    finally:
        library.crypt_free(context)


def _why(code: int, said: list[str]) -> str:
    return "; ".join(said) or os.strerror(-code)
