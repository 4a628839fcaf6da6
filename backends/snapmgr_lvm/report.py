"""Reads LVM's JSON reports as typed records. Nothing else that its programs print is ever read."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from snapmgr.api import CommandError, StorageError
from snapmgr_lvm import locks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from snapmgr.api import Pool, Runner

# lvs waits for the lock of a volume group that another command changes.
READ_TIMEOUT_S = 60.0
_FAILED = 5  # lvm2's ECMD_FAILED
_UUID_GROUPS = (6, 4, 4, 4, 4, 4, 6)
_GROUP_FIELDS = (
    "vg_name",
    "vg_uuid",
    "vg_size",
    "vg_free",
    "vg_extent_size",
    "vg_mda_free",
    "vg_missing_pv_count",
    "vg_exported",
    "vg_permissions",
    "vg_lock_type",
)
_VOLUME_FIELDS = (
    "lv_name",
    "lv_uuid",
    "lv_size",
    "lv_tags",
    "lv_role",
    "segtype",
    "chunk_size",
    "origin",
    "origin_uuid",
    "pool_lv_uuid",
    "lv_active",
    "lv_permissions",
    "lv_suspended",
    "lv_device_open",
    "lv_skip_activation",
    "lv_kernel_major",
    "lv_kernel_minor",
    "lv_time",
    "data_percent",
    "snap_percent",
    "metadata_percent",
    "lv_metadata_size",
    "lv_snapshot_invalid",
    "lv_merging",
    "lv_merge_failed",
    "lv_check_needed",
    "lv_health_status",
    "lv_when_full",
    "thin_id",
)


@dataclass(frozen=True, kw_only=True)
class LogicalVolume:
    """One logical volume, hidden ones included (`Group.volumes`)."""

    name: str
    """Without the brackets of hidden ones."""
    uuid: str
    size_bytes: int
    """Of a classic snapshot: its CoW table, not its virtual size."""
    tags: frozenset[str]
    roles: frozenset[str]
    """"public", "private", "origin", "snapshot", "thinsnapshot", …"""
    segtype: str
    """Of its first segment: "linear", "striped", "raid1", "thin", "thin-pool", "cache", …"""
    chunk_bytes: int
    """Of a classic snapshot or a thin pool; 0 for others."""
    origin_name: str | None
    origin_uuid: str | None
    pool_uuid: str | None
    """The thin pool's, for thin volumes."""
    active: bool
    writable: bool
    suspended: bool
    opened: bool
    """The device is open: by a mount, or another device-mapper device."""
    skip_activation: bool
    device: str | None
    """"MAJOR:MINOR" if it is active."""
    made_at: str
    """As LVM has it: "2026-01-31 02:30:00 +0000"."""
    data_percent: float | None
    """Thin pool: how full; active thin volume: how much of it is mapped. None where LVM does not know."""
    snap_percent: float | None
    """Classic snapshot: how full its CoW table is."""
    metadata_percent: float | None
    metadata_bytes: int | None
    """Size of a thin pool's metadata volume."""
    invalid: bool
    """A classic snapshot that was lost: its CoW table overflowed. One at 100 % is whole until the next first write."""
    merging: bool
    merge_failed: bool
    check_needed: bool
    """A thin pool whose metadata must be repaired."""
    health: str
    """"" when all is well; "partial", "failed", "out_of_data", "metadata_read_only", …"""
    when_full: str
    """Of a thin pool: "queue" or "error"."""
    thin_id: int | None

    @property
    def is_classic_snapshot(self) -> bool:
        """Whether it is a classic (CoW table) snapshot; its `origin_uuid` is of its origin."""
        return self.segtype not in ("thin", "thin-pool") and "snapshot" in self.roles

    @property
    def is_thin(self) -> bool:
        """Whether it is a thin volume, snapshot or not."""
        return self.segtype == "thin"


@dataclass(frozen=True, kw_only=True)
class Group:
    """A volume group and all that is in it."""

    name: str
    uuid: str
    size_bytes: int
    free_bytes: int
    extent_bytes: int
    metadata_free_bytes: int
    """Room in its metadata areas, where tags go."""
    missing_pvs: int
    exported: bool
    writable: bool
    lock_type: str
    """"" unless it is shared (lvmlockd)."""
    volumes: tuple[LogicalVolume, ...]

    def by_uuid(self, uuid: str | None) -> LogicalVolume | None:
        """Return the volume with this UUID."""
        return next((volume for volume in self.volumes if volume.uuid == uuid), None)

    def by_name(self, name: str) -> LogicalVolume | None:
        """Return the volume with this name."""
        return next((volume for volume in self.volumes if volume.name == name), None)


def read_group(runner: Runner, pool: Pool) -> Group:
    """Return the volume group with the UUID `pool.id`. Raises StorageError if it is not there or does not answer."""
    if not re.fullmatch(r"[A-Za-z0-9-]{38}", pool.id):
        raise StorageError(f"{pool.id!r} is not the UUID of a volume group")
    rows = _report(
        runner,
        ["lvs", "-a", "--select", f'vg_uuid="{pool.id}"', "-o", ",".join((*_GROUP_FIELDS, *_VOLUME_FIELDS))],
        "lv",
    )
    heads = rows or _report(runner, ["vgs", "--select", f'vg_uuid="{pool.id}"', "-o", ",".join(_GROUP_FIELDS)], "vg")
    if not heads:
        raise StorageError(
            f"the volume group {pool.hint} ({pool.id}) is not there",
            hint="are its disks connected? see: pvs, vgs -o +vg_uuid",
        )
    if _is_set(heads[0]["vg_exported"]):
        # LVM hides its contents, which must not look as if they were gone.
        name = heads[0]["vg_name"]
        raise StorageError(f"the volume group {name} is exported", hint=f"vgimport {name}")
    volumes: dict[str, LogicalVolume] = {}
    for row in rows:
        # One row a segment: the first one's type stands for the volume.
        volumes.setdefault(row["lv_uuid"], _volume(row))
    head = heads[0]
    return Group(
        name=head["vg_name"],
        uuid=head["vg_uuid"],
        size_bytes=int(head["vg_size"]),
        free_bytes=int(head["vg_free"]),
        extent_bytes=int(head["vg_extent_size"]),
        metadata_free_bytes=int(head["vg_mda_free"] or 0),
        missing_pvs=int(head["vg_missing_pv_count"] or 0),
        exported=_is_set(head["vg_exported"]),
        writable=head["vg_permissions"] != "read-only",
        lock_type="" if head["vg_lock_type"] == "none" else head["vg_lock_type"],
        volumes=tuple(volumes.values()),
    )


def hyphenate(plain: str) -> str:
    """Given a UUID as device-mapper has it (32 characters), return it as LVM writes it."""
    parts, start = [], 0
    for length in _UUID_GROUPS:
        parts.append(plain[start : start + length])
        start += length
    return "-".join(parts)


def _report(runner: Runner, argv: Sequence[str], kind: str) -> list[dict[str, str]]:
    argv = [*argv, "--reportformat", "json", "--units", "b", "--nosuffix", "--binary"]
    try:
        # Failed: also where only another volume group, exported or damaged, could not be read.
        answer = runner.run(argv, ok=(0, _FAILED), timeout_s=READ_TIMEOUT_S)
    except CommandError as error:
        busy = locks.holders()
        raise StorageError(
            f"LVM does not answer: {error.message}" + (f" ({'; '.join(busy)})" if busy else ""),
            hint="does another LVM command hang? see: ps, dmsetup info -c (a suspended device?)",
        ) from error
    rows = parse_report(answer.stdout, kind)
    if answer.returncode and not rows:
        raise StorageError(f"LVM cannot read the volume group: {answer.stderr.strip()}", hint="see: vgs, pvs")
    return rows


def parse_report(text: str, kind: str) -> list[dict[str, str]]:
    """Given what lvs, vgs or pvs printed as JSON, return its rows. Raises StorageError if it is something else."""
    try:
        reports: list[dict[str, Any]] = json.loads(text)["report"]
        return [row for report in reports for row in report[kind]]
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"LVM printed something unexpected ({error!r})") from error


def _is_set(value: str) -> bool:
    # With --binary: "1", "0", and "-1" where it is not known.
    return value not in ("", "0", "-1")


def _optional(value: str, convert: Callable[[str], Any] = str) -> Any:  # noqa: ANN401 - whatever `convert` makes
    return convert(value) if value not in ("", "-1") else None


def _words(value: str) -> frozenset[str]:
    return frozenset(value.split(",")) - {""}


def _volume(row: dict[str, str]) -> LogicalVolume:
    major, minor = row["lv_kernel_major"], row["lv_kernel_minor"]
    return LogicalVolume(
        name=row["lv_name"].strip("[]"),
        uuid=row["lv_uuid"],
        size_bytes=int(row["lv_size"] or 0),
        tags=_words(row["lv_tags"]),
        roles=_words(row["lv_role"]),
        segtype=row["segtype"],
        chunk_bytes=int(row["chunk_size"] or 0),
        origin_name=_optional(row["origin"].strip("[]")),
        origin_uuid=_optional(row["origin_uuid"]),
        pool_uuid=_optional(row["pool_lv_uuid"]),
        active=row["lv_active"] == "active",
        # "unknown" of a writable one that is not active.
        writable=row["lv_permissions"] not in ("", "read-only"),
        suspended=_is_set(row["lv_suspended"]),
        opened=_is_set(row["lv_device_open"]),
        skip_activation=_is_set(row["lv_skip_activation"]),
        device=f"{major}:{minor}" if major not in ("", "-1") else None,
        made_at=row["lv_time"],
        data_percent=_optional(row["data_percent"], float),
        snap_percent=_optional(row["snap_percent"], float),
        metadata_percent=_optional(row["metadata_percent"], float),
        metadata_bytes=_optional(row["lv_metadata_size"], int),
        invalid=_is_set(row["lv_snapshot_invalid"]),
        merging=_is_set(row["lv_merging"]),
        merge_failed=_is_set(row["lv_merge_failed"]),
        check_needed=_is_set(row["lv_check_needed"]),
        health=row["lv_health_status"],
        when_full=row["lv_when_full"],
        thin_id=_optional(row["thin_id"], int),
    )
