"""What LVM says of a logical volume, for tests without LVM."""

from __future__ import annotations

from typing import Any

from snapmgr_lvm.report import LogicalVolume


def logical_volume(**fields: object) -> LogicalVolume:
    """Return a volume with these fields: by default a plain one of 1 GiB that is active, read-only and not open."""
    values: dict[str, Any] = {
        "name": "db",
        "uuid": "uuid-db",
        "size_bytes": 1 << 30,
        "tags": frozenset(),
        "roles": frozenset({"public"}),
        "segtype": "linear",
        "chunk_bytes": 0,
        "origin_name": None,
        "origin_uuid": None,
        "pool_uuid": None,
        "active": True,
        "writable": False,
        "suspended": False,
        "opened": False,
        "skip_activation": False,
        "device": "253:0",
        "made_at": "2026-11-01 12:00:00 +0000",
        "data_percent": None,
        "snap_percent": None,
        "metadata_percent": None,
        "metadata_bytes": None,
        "invalid": False,
        "merging": False,
        "merge_failed": False,
        "check_needed": False,
        "health": "",
        "when_full": "",
        "thin_id": None,
    }
    return LogicalVolume(**values | fields)
