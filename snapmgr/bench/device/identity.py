"""Identifies a device by a word that stays with the hardware and that a person can type: the value of --wipe.

A name such as /dev/sdb does not identify a disk: another disk may have it after the next boot.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from snapmgr.system.blockdev import backing_file, udev_properties

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.contract.records import BlockDevice

_SYSFS = Path("/sys")
_BY_ID = Path("/dev/disk/by-id")
# These names come from the contents of a device or from a configuration, not from the device itself.
_NOT_HARDWARE = ("dm-name-", "lvm-pv-uuid-")
_MADE_BY_KERNEL = ("loop", "ram", "zram", "dm-", "md", "nbd")
_VPD_HEADER_BYTES = 4

Source = Literal["serial", "wwn", "by-id", "device-mapper", "loop file", ""]


@dataclass(frozen=True, kw_only=True)
class Identity:
    """The identity of a device."""

    text: str
    """The value for --wipe; "" if unknown."""
    source: Source
    model: str
    """Model for messages; "" if unknown."""
    why_not: str = ""
    """Why the identity is unknown, as the end of a sentence."""
    twin: str = ""
    """Another device with the same WWN, which is a second path to the same disk."""


def identify(device: BlockDevice, *, sysfs: Path = _SYSFS, by_id: Path = _BY_ID) -> Identity:
    """Given a device, return its identity: its serial number, else its WWN, else its name in /dev/disk/by-id.

    A partition has its disk's identity with "-partN". An identity shared by another device here does not count.
    """
    if device.kind == "part" and device.below:
        whole = identify(device.below[0], sysfs=sysfs, by_id=by_id)
        number = _attribute(sysfs / "dev/block" / device.number / "partition") or _part_number(device)
        text = f"{whole.text}-part{number}" if whole.text and number else ""
        return Identity(
            text=text, source=whole.source if text else "", model=whole.model, why_not=whole.why_not, twin=whole.twin
        )
    if device.kind == "loop":
        file = backing_file(device, sysfs=sysfs)
        if file is None:
            return Identity(text="", source="", model="loop device", why_not="no file is attached to it")
        return Identity(text=f"loop:{file}", source="loop file", model="loop device")
    if device.dm_uuid:
        return Identity(text=device.dm_uuid, source="device-mapper", model=f"device-mapper {device.kind}")
    return _identify_disk(device, sysfs, by_id)


def _identify_disk(device: BlockDevice, sysfs: Path, by_id: Path) -> Identity:
    folder = (sysfs / "dev/block" / device.number).resolve()
    own = dict(_candidates(folder, device.number))
    others = dict(_others(folder, sysfs))
    model = _model(folder, device.number)
    wwn = own.get("wwn", "")
    twin = next((path for path, theirs in others.items() if wwn and theirs.get("wwn") == wwn), "")
    shared = ""
    sources: tuple[Source, ...] = ("serial", "wwn")
    for source in sources:
        text = own.get(source, "")
        double = next((path for path, theirs in others.items() if text and text in theirs.values()), "")
        if text and not double:
            return Identity(text=text, source=source, model=model, twin=twin)
        shared = shared or (f"{double} has the same {source}" if double else "")
    if not shared and (name := _by_id(device.path, by_id)):
        return Identity(text=name, source="by-id", model=model)
    why_not = shared or "it has neither a serial number nor a WWN, and no name in /dev/disk/by-id"
    return Identity(text="", source="", model=model, why_not=why_not, twin=twin)


def normal(text: str) -> str:
    """Return an identity in a form for comparison: disks pad their serial numbers with spaces."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _candidates(folder: Path, number: str) -> Iterator[tuple[Source, str]]:
    """Yield the serial number and WWN of a whole disk, as far as sysfs and udev know them."""
    facts = udev_properties(number)
    serial = (
        _attribute(folder / "serial")
        or _attribute(folder / "device/serial")
        or facts.get("ID_SERIAL_SHORT")
        or _vpd_serial(folder / "device/vpd_pg80")
    )
    wwn = _attribute(folder / "wwid") or _attribute(folder / "device/wwid") or facts.get("ID_WWN_WITH_EXTENSION")
    # All zeros (cheap USB bridges) do not count as a serial number.
    if serial and normal(serial).strip("0 "):
        yield "serial", normal(serial)
    if wwn and normal(wwn):
        yield "wwn", normal(wwn)


def _others(folder: Path, sysfs: Path) -> Iterator[tuple[str, dict[Source, str]]]:
    for entry in sorted((sysfs / "block").glob("*")):
        if entry.name.startswith(_MADE_BY_KERNEL) or entry.resolve() == folder:
            continue
        # NVMe's own multipathing lists each path as a hidden device, which cannot be opened.
        if _attribute(entry / "hidden") == "1":
            continue
        with suppress(OSError):
            yield f"/dev/{entry.name}", dict(_candidates(entry.resolve(), (entry / "dev").read_text().strip()))


def _model(folder: Path, number: str) -> str:
    told = [_attribute(folder / "device/vendor"), _attribute(folder / "device/model")]
    # A virtio disk's "vendor" is a PCI number.
    words = [word for word in told if word and not word.startswith("0x")]
    # Linux writes "ATA" instead of a vendor.
    text = " ".join(word for word in words if word != "ATA")
    return normal(text or udev_properties(number).get("ID_MODEL", "").replace("_", " "))


def _by_id(path: str, folder: Path) -> str:
    links = [link for link in folder.glob("*") if not link.name.startswith(_NOT_HARDWARE)]
    return min((link.name for link in links if os.path.realpath(link) == path), default="")


def _part_number(device: BlockDevice) -> str:
    """Return the number of a partition that is a device-mapper device: "part2-mpath-…"."""
    prefix = (device.dm_uuid or "").partition("-")[0]
    return prefix.removeprefix("part")


def _vpd_serial(path: Path) -> str:
    """Return the serial number of a SCSI disk (vital product data, page 0x80: four bytes, then text)."""
    with suppress(OSError):
        return path.read_bytes()[_VPD_HEADER_BYTES:].decode("ascii", "replace").strip("\0 ")
    return ""


def _attribute(path: Path) -> str:
    with suppress(OSError):
        return normal(path.read_bytes().decode("utf-8", "replace"))
    return ""
