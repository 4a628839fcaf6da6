"""Asks the kernel about device-mapper, the devices below others and our rights."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_SYSFS = Path("/sys/dev/block")
_CAP_SYS_ADMIN = 21


def holds(number: str, volume_number: str) -> bool:
    """Whether the device `number` ("253:4") is `volume_number`, or lies on it (a LUKS container)."""
    if number == volume_number:
        return True
    slaves = _SYSFS / number / "slaves"
    with suppress(OSError):
        return any((lower / "dev").read_text().strip() == volume_number for lower in slaves.iterdir())
    return False


def has_device_mapper() -> bool:
    """Whether the kernel has device-mapper, or can load it."""
    if os.path.exists("/sys/class/misc/device-mapper"):
        return True
    listed = Path("/lib/modules") / os.uname().release / "modules.dep"
    with suppress(OSError):
        return "/dm-mod.ko" in listed.read_text()
    return False


def is_privileged() -> bool:
    """Whether we have CAP_SYS_ADMIN."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return False
