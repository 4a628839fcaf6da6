"""Which machine this is, and which of its boots."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def tag() -> str:
    """Return eight hex digits that stand for this machine: by machine-id(5), or by its name where it has none."""
    own = os.uname().nodename
    with suppress(OSError):
        own = Path("/etc/machine-id").read_text(encoding="ascii").strip() or own
    return hashlib.sha256(own.encode()).hexdigest()[:8]
