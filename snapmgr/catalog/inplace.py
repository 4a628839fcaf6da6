"""Stores the record of an in-place restore, from before anything is unmounted until everything is mounted again.

``STATE/inplace/TOKEN.json``. While it exists, no run of its jobs takes, prunes or deletes snapshots.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Struct

from snapmgr.catalog.manifest import SCHEMA, decode, encode
from snapmgr.catalog.recordfolder import names_in, require_name
from snapmgr.contract.errors import BusyError, CatalogError, MissingRequirementError, NotFoundError
from snapmgr.contract.recordpath import Absolute, Name, Token
from snapmgr.contract.records import SnapshotRef
from snapmgr.system.files import drop_file, read_file, space_hint, write_file
from snapmgr.system.host import Process, is_alive

if TYPE_CHECKING:
    from pathlib import Path

    from snapmgr.catalog.store import Catalog

Step = Literal["unmounting", "merging", "merged"]

MERGED = "merged into its origin"
"""Beginning of the reason of a snapshot that an in-place restore consumed."""


class MountRecord(Struct, frozen=True, kw_only=True):
    """How a file system was mounted, to mount it again in the same way."""

    point: Absolute
    root: Absolute
    """The mounted folder of the file system."""
    fs_type: str
    options: tuple[str, ...]
    """Options of the mount."""
    super_options: tuple[str, ...]
    """Options of the file system."""


class OriginRecord(Struct, frozen=True, kw_only=True):
    """One origin of the restore."""

    ref: SnapshotRef
    """The member that it is restored from, as before the restore."""
    origin: str
    """`RevertPlan.origin`."""
    device: Annotated[str, msgspec.Meta(pattern=r"\A/dev/")]
    """`RevertPlan.device`."""
    mounts: tuple[MountRecord, ...]
    """In the order in which they were mounted."""


class InplaceRecord(Struct, frozen=True, kw_only=True):
    """A running or unfinished in-place restore."""

    token: Token
    snapshot_id: Name
    jobs: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1)]
    """Jobs with snapshots of these origins, the snapshot's own job first.

    The holder of that job's lock may continue it.
    """
    holder: Process
    user: str
    began_at: datetime
    parts: Annotated[tuple[OriginRecord, ...], msgspec.Meta(min_length=1)]
    step: Step = "unmounting"
    """"unmounting": nothing is changed yet; "merging": everything is unmounted; "merged": the data are restored."""
    merged_at: datetime | None = None
    schema: int = SCHEMA

    @property
    def origins(self) -> str:
        """Its origins, to print."""
        return ", ".join(part.origin for part in self.parts)


def inplace_records(catalog: Catalog) -> tuple[InplaceRecord, ...]:
    """Return the running and unfinished in-place restores, oldest first.

    Raises CatalogError for a record that cannot be read, as it must not be ignored.
    """
    try:
        names = sorted(name for name in names_in(_folder(catalog)) if name.endswith(".json"))
    except MissingRequirementError:
        return ()
    found = []
    for path in (_folder(catalog) / name for name in names):
        try:
            record = decode(read_file(path), InplaceRecord, str(path))
        except NotFoundError:
            continue
        require_name(path, f"{record.token}.json")
        found.append(record)
    return tuple(sorted(found, key=lambda record: record.began_at))


def write_inplace(catalog: Catalog, record: InplaceRecord) -> None:
    """Store a record durably."""
    folder = _folder(catalog)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise CatalogError(f"cannot create {folder}: {error.strerror}", hint=space_hint(error)) from None
    write_file(folder / f"{record.token}.json", encode(record))


def drop_inplace(catalog: Catalog, record: InplaceRecord) -> None:
    """Remove the record of a restore that is complete or undone; idempotent."""
    drop_file(_folder(catalog) / f"{record.token}.json")


def refuse_unfinished_inplace(catalog: Catalog, *jobs: str) -> None:
    """Raise BusyError if an in-place restore of an origin of `jobs` is running or unfinished."""
    for record in inplace_records(catalog):
        if set(jobs) & set(record.jobs):
            raise _unfinished(record)


def refuse_inplace_target(catalog: Catalog, snapshot_id: str) -> None:
    """Raise BusyError if an in-place restore from this snapshot is running or unfinished."""
    for record in inplace_records(catalog):
        if record.snapshot_id == snapshot_id:
            raise _unfinished(record)


def _unfinished(record: InplaceRecord) -> BusyError:
    if is_alive(record.holder):
        return BusyError(
            f"an in-place restore of {record.origins} from {record.snapshot_id} is running (pid {record.holder.pid})",
            hint="wait for it to end",
        )
    return BusyError(
        f"the in-place restore of {record.origins} from {record.snapshot_id} is unfinished",
        hint=f"continue it: snapmgr restore {record.snapshot_id} --in-place, or snapmgr doctor --fix",
    )


def _folder(catalog: Catalog) -> Path:
    return catalog.path / "inplace"
