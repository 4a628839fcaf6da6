"""Finds the disks of this machine that a benchmark may use without --wipe."""

from __future__ import annotations

from pathlib import Path

from snapmgr.bench.device.target import preview_target
from snapmgr.contract.errors import SnapmgrError

_BLOCK = Path("/sys/block")


def blank_disks(*, needed_bytes: int, sysfs: Path = _BLOCK) -> list[tuple[str, str]]:
    """Return node and title of each disk that is unused, blank and large enough. Changes nothing; root only.

    Only disks with hardware behind them: no loop devices, no memory, nothing made of other devices.
    """
    found = []
    for name in sorted(entry.name for entry in sysfs.iterdir() if (entry / "device").exists()):
        path = f"/dev/{name}"
        try:
            found.append((path, preview_target(path, size_bytes=needed_bytes, wipe=None)))
        except SnapmgrError:
            # Each refusal is a reason why it is not offered.
            continue
    return found
