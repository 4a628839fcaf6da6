"""Runs LVM's programs: reads their JSON reports as typed records, and never kills one that changes something.

It reads none of their other output.
"""

from __future__ import annotations

import json
import re
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from msgspec import Struct

from snapmgr.api import CommandError, StorageError
from snapmgr_lvm import locks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from snapmgr.api import Pool, Runner

# lvs waits for the lock of a volume group that another command changes.
READ_TIMEOUT_S = 60.0
_FAILED = 5  # lvm2's ECMD_FAILED
_UUID_GROUPS = (6, 4, 4, 4, 4, 4, 6)


class _Column:
    """The source columns of a field in a report, and their conversion; a lambda there cannot use global names."""

    def __init__(self, read: Callable[..., object], *names: str) -> None:
        self.read = read
        self.names = names


def _number(value: str) -> int:
    return int(value or 0)


def _is_set(value: str) -> bool:
    # With --binary: "1", "0", and "-1" for unknown.
    return value not in ("", "0", "-1")


def _text_or_none(value: str) -> str | None:
    # LVM prints the names of hidden volumes in brackets.
    return value.strip("[]") if value not in ("", "-1") else None


def _number_or_none(value: str) -> int | None:
    return int(value) if value not in ("", "-1") else None


def _percent(value: str) -> float | None:
    return float(value) if value not in ("", "-1") else None


def _device(major: str, minor: str) -> str | None:
    return f"{major}:{minor}" if major not in ("", "-1") else None


def _words(value: str) -> frozenset[str]:
    return frozenset(value.split(",")) - {""}


class LogicalVolume(Struct, frozen=True, kw_only=True):
    """One logical volume, hidden ones included (`Group.volumes`)."""

    name: Annotated[str, _Column(lambda value: value.strip("[]"), "lv_name")]
    """Without the brackets of hidden ones."""
    uuid: Annotated[str, _Column(str, "lv_uuid")]
    size_bytes: Annotated[int, _Column(_number, "lv_size")]
    """For a classic snapshot: the size of its CoW table, not its virtual size."""
    tags: Annotated[frozenset[str], _Column(_words, "lv_tags")]
    roles: Annotated[frozenset[str], _Column(_words, "lv_role")]
    """"public", "private", "origin", "snapshot", "thinsnapshot", …"""
    segtype: Annotated[str, _Column(str, "segtype")]
    """Type of its first segment: "linear", "striped", "raid1", "thin", "thin-pool", "cache", …"""
    chunk_bytes: Annotated[int, _Column(_number, "chunk_size")]
    """Chunk size of a classic snapshot or a thin pool; 0 for others."""
    origin_name: Annotated[str | None, _Column(_text_or_none, "origin")]
    origin_uuid: Annotated[str | None, _Column(_text_or_none, "origin_uuid")]
    pool_uuid: Annotated[str | None, _Column(_text_or_none, "pool_lv_uuid")]
    """The thin pool's, for thin volumes."""
    active: Annotated[bool, _Column(lambda value: value == "active", "lv_active")]
    # "unknown" for an inactive writable one.
    writable: Annotated[bool, _Column(lambda value: value not in ("", "read-only"), "lv_permissions")]
    suspended: Annotated[bool, _Column(_is_set, "lv_suspended")]
    opened: Annotated[bool, _Column(_is_set, "lv_device_open")]
    """Whether a mount or another device-mapper device has the device open."""
    skip_activation: Annotated[bool, _Column(_is_set, "lv_skip_activation")]
    device: Annotated[str | None, _Column(_device, "lv_kernel_major", "lv_kernel_minor")]
    """"MAJOR:MINOR" if it is active."""
    made_at: Annotated[str, _Column(str, "lv_time")]
    """In LVM's format: "2026-01-31 02:30:00 +0000"."""
    data_percent: Annotated[float | None, _Column(_percent, "data_percent")]
    """Usage of a thin pool, or the mapped share of an active thin volume. None if LVM does not know it."""
    snap_percent: Annotated[float | None, _Column(_percent, "snap_percent")]
    """Usage of a classic snapshot's CoW table."""
    metadata_percent: Annotated[float | None, _Column(_percent, "metadata_percent")]
    metadata_bytes: Annotated[int | None, _Column(_number_or_none, "lv_metadata_size")]
    """Size of a thin pool's metadata volume."""
    invalid: Annotated[bool, _Column(_is_set, "lv_snapshot_invalid")]
    """Whether a classic snapshot is lost: its CoW table overflowed. At 100 % it is valid until the next first write."""
    merging: Annotated[bool, _Column(_is_set, "lv_merging")]
    merge_failed: Annotated[bool, _Column(_is_set, "lv_merge_failed")]
    check_needed: Annotated[bool, _Column(_is_set, "lv_check_needed")]
    """Whether a thin pool's metadata must be repaired."""
    health: Annotated[str, _Column(str, "lv_health_status")]
    """"" if healthy; otherwise "partial", "failed", "out_of_data", "metadata_read_only", …"""
    when_full: Annotated[str, _Column(str, "lv_when_full")]
    """Behaviour of a full thin pool: "queue" or "error"."""
    thin_id: Annotated[int | None, _Column(_number_or_none, "thin_id")]

    @property
    def is_classic_snapshot(self) -> bool:
        """Whether it is a classic (CoW table) snapshot; `origin_uuid` then names its origin."""
        return self.segtype not in ("thin", "thin-pool") and "snapshot" in self.roles

    @property
    def is_thin(self) -> bool:
        """Whether it is a thin volume, snapshot or not."""
        return self.segtype == "thin"


class Group(Struct, frozen=True, kw_only=True):
    """A volume group with all its contents."""

    name: Annotated[str, _Column(str, "vg_name")]
    uuid: Annotated[str, _Column(str, "vg_uuid")]
    size_bytes: Annotated[int, _Column(int, "vg_size")]
    free_bytes: Annotated[int, _Column(int, "vg_free")]
    extent_bytes: Annotated[int, _Column(int, "vg_extent_size")]
    metadata_free_bytes: Annotated[int, _Column(_number, "vg_mda_free")]
    """Free space in its metadata areas, which hold the tags."""
    missing_pvs: Annotated[int, _Column(_number, "vg_missing_pv_count")]
    exported: Annotated[bool, _Column(_is_set, "vg_exported")]
    writable: Annotated[bool, _Column(lambda value: value != "read-only", "vg_permissions")]
    lock_type: Annotated[str, _Column(lambda value: "" if value == "none" else value, "vg_lock_type")]
    """"" unless it is shared (lvmlockd)."""
    volumes: tuple[LogicalVolume, ...]

    def by_uuid(self, uuid: str | None) -> LogicalVolume | None:
        """Return the volume with this UUID."""
        return next((volume for volume in self.volumes if volume.uuid == uuid), None)

    def by_name(self, name: str) -> LogicalVolume | None:
        """Return the volume with this name."""
        return next((volume for volume in self.volumes if volume.name == name), None)


def read_group(runner: Runner, pool: Pool) -> Group:
    """Return the volume group with the UUID `pool.id`. Raises StorageError if it is missing or does not answer."""
    if not re.fullmatch(r"[A-Za-z0-9-]{38}", pool.id):
        raise StorageError(f"{pool.id!r} is not the UUID of a volume group")
    select = ["--select", f'vg_uuid="{pool.id}"']
    rows = _report(runner, ["lvs", "-a", *select, *_options(Group, LogicalVolume)], "lv")
    heads = rows or _report(runner, ["vgs", *select, *_options(Group)], "vg")
    if not heads:
        raise StorageError(
            f"the volume group {pool.hint} ({pool.id}) is not there",
            hint="are its disks connected? see: pvs, vgs -o +vg_uuid",
        )
    if _is_set(heads[0]["vg_exported"]):
        # LVM hides its contents; they must not appear to be gone.
        name = heads[0]["vg_name"]
        raise StorageError(f"the volume group {name} is exported", hint=f"vgimport {name}")
    volumes: dict[str, LogicalVolume] = {}
    for row in rows:
        # One row per segment: the first one's type stands for the volume.
        volumes.setdefault(row["lv_uuid"], LogicalVolume(**_values(LogicalVolume, row)))
    return Group(**_values(Group, heads[0]), volumes=tuple(volumes.values()))


@cache
def _columns(record: type) -> dict[str, _Column]:
    """Return the columns of a record's fields."""
    hints = get_type_hints(record, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def _options(*records: type) -> list[str]:
    """Return the arguments that make LVM report the columns of these records."""
    return ["-o", ",".join(name for record in records for column in _columns(record).values() for name in column.names)]


def _values(record: type, row: dict[str, str]) -> dict[str, Any]:
    return {field: column.read(*(row[name] for name in column.names)) for field, column in _columns(record).items()}


def change(runner: Runner, argv: Sequence[str], *, timeout_s: float = 60.0) -> None:
    """Run a command of LVM. Raises StorageError if it fails, or after `timeout_s`; it then keeps running.

    A killed command might leave a device suspended.
    """
    try:
        runner.run(argv, timeout_s=timeout_s, abandon=True)
    except CommandError as error:
        raise StorageError(error.message, hint=error.hint) from error


def hyphenate(plain: str) -> str:
    """Convert a UUID from device-mapper's form (32 characters) to LVM's."""
    parts, start = [], 0
    for length in _UUID_GROUPS:
        parts.append(plain[start : start + length])
        start += length
    return "-".join(parts)


def _report(runner: Runner, argv: Sequence[str], kind: str) -> list[dict[str, str]]:
    argv = [*argv, "--reportformat", "json", "--units", "b", "--nosuffix", "--binary"]
    try:
        # A failure may also mean that only another volume group, exported or damaged, could not be read.
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
    """Return the rows of a JSON report by lvs, vgs or pvs. Raises StorageError for any other text."""
    try:
        reports: list[dict[str, Any]] = json.loads(text)["report"]
        return [row for report in reports for row in report[kind]]
    except (ValueError, KeyError, TypeError) as error:
        raise StorageError(f"LVM printed something unexpected ({error!r})") from error
