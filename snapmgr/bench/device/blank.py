"""Checks whether a block device may be formatted: finds its users and its data.

Users are found through the kernel: an exclusive open, sysfs, the mount tables of all namespaces, open descriptors. Data
are found by ``blkid -p`` and ``wipefs``, which probe in different ways, and by reading the device.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.bench.device.backing import file_uses, writes
from snapmgr.contract.errors import CommandError, SnapmgrError
from snapmgr.system.blockdev import parse_blkid, read_mounts, udev_properties

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.bench.device.mark import Signature
    from snapmgr.contract.backend import Runner
    from snapmgr.contract.records import BlockDevice

_SYSFS = Path("/sys")
_PROC = Path("/proc")
_NOTHING_FOUND = 2
_SEVERAL_FOUND = 8
_PROBE_TIMEOUT_S = 60.0
_PROCESSES_SHOWN = 4


@dataclass(frozen=True, kw_only=True)
class FoundSignature:
    """One signature, or the partition table, on a device or on one of its partitions."""

    signature: Signature
    shown: str
    """Description: "btrfs (UUID 3f…, label srv)"."""
    partition: bool = False
    """Whether it is a partition, or lies in one."""


# ------------------------------------------------------------------------------------------------------ who uses it


def uses(device: BlockDevice, *, sysfs: Path = _SYSFS, proc: Path = _PROC) -> tuple[str, ...]:
    """Return everything that forbids writing to a device, each as a sentence without a full stop.

    --wipe never overrules any of it. Descriptors of this process do not count.
    """
    parts = partitions(device, sysfs=sysfs)
    found = [*_state(device, sysfs), *_uses_of(device.number, device.path, sysfs, proc)]
    found += [f"its partition {path}: {use}" for number, path in parts for use in _uses_of(number, path, sysfs, proc)]
    if device.kind == "part":
        for disk in device.below:
            found += [f"its disk {disk.path}: {use}" for use in _uses_of(disk.number, disk.path, sysfs, proc)]
    if udev_properties(device.number).get("DM_MULTIPATH_DEVICE_PATH") == "1":
        found.append("multipathd has it: it is one path of several to a disk")
    found += file_uses(device, _uses_of, sysfs=sysfs, proc=proc)
    if not found and (held := refused_exclusively(device.path)):
        found.append(held)
    # Writers that the kernel does not know as users: a virtual machine, a database on a raw device.
    if not found:
        found += _writers({device.number: device.path} | dict(parts), proc)
    return tuple(found)


def refused_exclusively(path: str) -> str:
    """Return why the kernel refuses us an exclusive open of the device; "" if it grants one.

    A mount in any namespace, swap, and any device-mapper, md, bcache or ZFS device on top hold it exclusively.
    """
    try:
        os.close(os.open(path, os.O_RDWR | os.O_EXCL | os.O_CLOEXEC))
    except OSError as error:
        if error.errno == errno.EBUSY:
            return "the kernel says that something holds it (a mount in another namespace, a storage on top of it)"
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            return f"it cannot be written to ({error.strerror})"
        return f"it cannot be opened ({error.strerror})"
    return ""


def partitions(device: BlockDevice, *, sysfs: Path = _SYSFS) -> tuple[tuple[str, str], ...]:
    """Return the number and path of each partition that the kernel knows on a device."""
    found = []
    folder = (sysfs / "dev/block" / device.number).resolve()
    for entry in sorted(folder.glob("*/partition")):
        uevent = (entry.parent / "uevent").read_text()
        name = re.search(r"^DEVNAME=(.+)$", uevent, re.MULTILINE)
        found.append(((entry.parent / "dev").read_text().strip(), f"/dev/{name[1] if name else entry.parent.name}"))
    return tuple(found)


def _state(device: BlockDevice, sysfs: Path) -> Iterator[str]:
    folder = sysfs / "dev/block" / device.number
    if device.size_bytes == 0:
        yield "it has no medium, or is gone"
    if _read(folder / "ro") == "1":
        yield "it is read-only"
    if _read(folder / "hidden") == "1":
        yield "it is hidden: one path of a multipath disk"
    if _read(folder / "queue/zoned") == "host-managed":
        yield "it is a zoned (SMR) disk that only takes sequential writes"


def _uses_of(number: str, path: str, sysfs: Path, proc: Path) -> Iterator[str]:
    """Yield the uses of a device or partition by the kernel and other processes, without its own partitions."""
    yield from (f"mounted at {where}" for where in _mounted(number, proc))
    if any(_number_of(line.split()[0]) == number for line in _lines(proc / "swaps")[1:]):
        yield "it is active swap space"
    holders = sysfs / "dev/block" / number / "holders"
    with suppress(OSError):
        for holder in sorted(holders.iterdir()):
            name = _read(holder / "dm/name")
            yield f"held by {holder.name}" + (f" ({name})" if name else "") + ": LVM, RAID, encryption or multipath"
    for link in (sysfs / "fs/btrfs").glob("*/devices/*"):
        if _read(link / "dev") == number:
            yield f"part of the mounted btrfs {link.parts[-3]}"
    for backing in (sysfs / "block").glob("loop*/loop/backing_file"):
        if _number_of(_read(backing)) == number:
            yield f"the loop device /dev/{backing.parts[-3]} lies on {path}"
    # This is the only user in the kernel that does not claim its devices.
    for exported in (sysfs / "kernel/config/nvmet/subsystems").glob("*/namespaces/*/device_path"):
        if _number_of(_read(exported)) == number:
            yield f"exported over NVMe, by {exported.parts[-4]}"


def _mounted(number: str, proc: Path) -> Iterator[str]:
    """Yield the mounts of a device in all mount namespaces that we may read."""
    seen: set[str] = set()
    told: set[str] = set()
    for process in (proc / "self", *sorted(proc.glob("[0-9]*"))):
        with suppress(OSError, SnapmgrError):
            namespace = os.readlink(process / "ns/mnt")
            if namespace in seen:
                continue
            seen.add(namespace)
            elsewhere = f" (mount namespace of process {process.name})" if process.name != "self" else ""
            for mount in read_mounts(str(process / "mountinfo")):
                if mount.device == number and mount.point not in told:
                    told.add(mount.point)
                    yield mount.point + elsewhere


def _writers(numbers: dict[str, str], proc: Path) -> list[str]:
    """Return the processes other than ours that have one of some devices open for writing."""
    found: list[str] = []
    for process in proc.glob("[0-9]*"):
        if process.name == str(os.getpid()) or len(found) >= _PROCESSES_SHOWN:
            continue
        with suppress(OSError):
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    # Only paths like device nodes are followed: a stat of anything else could hang.
                    if not os.readlink(link).startswith("/dev/"):
                        continue
                    number = _number_of(str(link))
                    if number in numbers and writes(process / "fdinfo" / link.name):
                        name = (process / "comm").read_text().strip()
                        found.append(f"{name} (pid {process.name}) has {numbers[number]} open for writing")
                        break
    return found


def _number_of(path: str) -> str:
    """Return the number of the block device at a path; "" if the path is none."""
    with suppress(OSError, ValueError):
        found = os.stat(path)
        if stat.S_ISBLK(found.st_mode):
            return f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}"
    return ""


# ---------------------------------------------------------------------------------------------------- what is on it


def signatures(device: BlockDevice, *, runner: Runner, sysfs: Path = _SYSFS) -> tuple[FoundSignature, ...]:
    """Given a device, return all signatures on it, and its partitions with theirs.

    Raises CommandError if a probe fails: a device that cannot be probed is never taken for blank.
    """
    found = [*_probed(device.path, runner)]
    for _number, path in partitions(device, sysfs=sysfs):
        inner = ", ".join(one.shown for one in _probed(path, runner)) or "nothing known"
        found.append(FoundSignature(signature=("partition", ""), shown=f"a partition {path}: {inner}", partition=True))
    return tuple(found)


def _probed(path: str, runner: Runner) -> list[FoundSignature]:
    found: dict[Signature, FoundSignature] = {}
    for kind, uuid, label in (*_by_blkid(path, runner), *_by_wipefs(path, runner)):
        # wipefs repeats blkid's findings, some of them at several places, and reports no UUID of a partition table.
        if uuid or all(kind != other for other, _uuid in found):
            found.setdefault((kind, uuid), FoundSignature(signature=(kind, uuid), shown=_shown(kind, uuid, label)))
    return list(found.values())


def _shown(kind: str, uuid: str, label: str) -> str:
    more = ", ".join(f"{word} {text}" for word, text in (("UUID", uuid), ("label", label)) if text)
    return f"{kind} ({more})" if more else kind


def _by_blkid(path: str, runner: Runner) -> Iterator[tuple[str, str, str]]:
    argv = ["blkid", "-p", "-o", "export", path]
    answer = runner.run(argv, ok=(0, _NOTHING_FOUND, _SEVERAL_FOUND), timeout_s=_PROBE_TIMEOUT_S)
    if answer.returncode == _SEVERAL_FOUND:
        yield "several signatures that contradict each other", "", ""
    facts = parse_blkid(answer.stdout)
    # A file system may also show a UUID_SUB, that of one device among several.
    if "TYPE" in facts:
        yield facts["TYPE"], facts.get("UUID", ""), facts.get("LABEL", "")
    if "PTTYPE" in facts:
        yield f"{facts['PTTYPE']} partition table", facts.get("PTUUID", ""), ""


def _by_wipefs(path: str, runner: Runner) -> Iterator[tuple[str, str, str]]:
    answer = runner.run(["wipefs", "--json", path], timeout_s=_PROBE_TIMEOUT_S).stdout
    if not answer.strip():
        return
    try:
        for entry in json.loads(answer)["signatures"]:
            kind = str(entry["type"])
            # The same word as blkid's, so that one finding is reported once.
            kind = f"{kind} partition table" if kind in ("dos", "gpt", "PMBR", "sun", "mac", "bsd", "sgi") else kind
            yield kind, entry.get("uuid") or "", entry.get("label") or ""
    except (ValueError, KeyError, TypeError) as error:
        raise CommandError(f"wipefs printed something unexpected about {path} ({error!r})") from error


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace").rstrip("\n")
    return ""


def _lines(path: Path) -> list[str]:
    with suppress(OSError):
        return path.read_text(errors="replace").splitlines()
    return []
