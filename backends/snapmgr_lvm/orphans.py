"""Removes devices of our volumes that LVM no longer knows because one of its commands was killed halfway.

LVM never removes them, and its own removal of the volume leaves half-made ones alone. They occupy a name, and may map
space that now belongs to another volume.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from snapmgr.api import Found
from snapmgr_lvm import dm
from snapmgr_lvm.inventory import pool_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.api import Pool
    from snapmgr_lvm.dm import Device
    from snapmgr_lvm.report import Group

WHY = "it is a device of a logical volume that is gone: a command of LVM was interrupted"
# lvm(8): VG-LV, with doubled hyphens in names. The layers of a volume have a suffix: "-cow", "-real".
_OURS = re.compile(r"(?<!-)-snapmgr\.")


def candidates(pool: Pool) -> tuple[Device, ...]:
    """Return the devices of volumes with our names in a volume group, layers included.

    Call it before reading the group, so that the metadata include a volume that is made meanwhile.
    """
    prefix = dm.lvm_uuid(pool.id, "")
    return tuple(one for one in dm.devices("") if one.uuid.startswith(prefix) and _OURS.search(one.name))


def found(group: Group, before: tuple[Device, ...]) -> Iterator[Found]:
    """Yield the devices of `before` whose volume is not in the group, which was read after them."""
    known = {dm.lvm_uuid(group.uuid, volume.uuid) for volume in group.volumes}
    for device in before:
        # Devices whose removal was in progress are gone now.
        if _volume_part(device.uuid) not in known and dm.find(device.uuid) is not None:
            yield Found(kind="debris", pool=pool_of(group), name=device.name, why=WHY)


def remove(group: Group, before: tuple[Device, ...], name: str) -> None:
    """Remove the device `name`, if it is what `found` yields; idempotent. Raises InUseError if it is open."""
    if any(one.name == name for one in found(group, before)):
        device = dm.find_name(name)
        if device is not None:
            dm.remove(device)


def remove_layers(group_uuid: str, volume_uuid: str) -> None:
    """Remove the leftover devices of a volume that was just removed. Errors as `remove`."""
    prefix = dm.lvm_uuid(group_uuid, volume_uuid)
    # Devices without a suffix lie on the others.
    for device in sorted(dm.devices(""), key=lambda one: one.uuid):
        if _volume_part(device.uuid) == prefix and _OURS.search(device.name):
            dm.remove(device)


def _volume_part(uuid: str) -> str:
    """Return the UUID of a device without its layer's suffix: "LVM-", and 32 characters for group and volume each."""
    return uuid[: len("LVM-") + 64]
