"""Tells which machine this is, and which of its boots."""

from __future__ import annotations

import os
from pathlib import Path


def boot_id() -> str:
    """Return the kernel's id of this boot: mounts, loop devices and pids of another one are gone."""
    # From bytes: a file opened as ASCII loads a codec first.
    return Path("/proc/sys/kernel/random/boot_id").read_bytes().decode("ascii").strip()


def machine_id() -> str:
    """Return this machine's id (machine-id(5)), or its host name where it has none."""
    return lasting_machine_id() or os.uname().nodename


def lasting_machine_id() -> str | None:
    """Return this machine's id (machine-id(5)); None where it has none, as in many containers, whose names change."""
    for path in (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id")):
        try:
            text = path.read_bytes().decode("ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text and text != "uninitialized":
            return text
    return None
