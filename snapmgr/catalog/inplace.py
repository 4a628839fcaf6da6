"""The record of an in-place restore: on disk before anything is unmounted, and until all is mounted again.

``STATE/inplace/TOKEN.json``. While it is there no run of the jobs that it names takes, prunes or deletes snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from snapmgr.catalog.manifest import SCHEMA, decode, encode
from snapmgr.contract.errors import BusyError, CatalogError, NotFoundError
from snapmgr.contract.records import SnapshotRef
from snapmgr.system.files import drop_file, read_file, space_hint, write_file
from snapmgr.system.host import Process, is_alive

if TYPE_CHECKING:
    from pathlib import Path

    from snapmgr.catalog.store import Catalog

Step = Literal["unmounting", "merging", "merged"]

MERGED = "merged into its origin"
"""How the reason begins of a snapshot that an in-place restore used up."""


@dataclass(frozen=True, kw_only=True)
class MountRecord:
    """Where a file system was mounted, and how: enough to do it again."""

    point: Annotated[str, msgspec.Meta(pattern=r"\A/")]
    root: Annotated[str, msgspec.Meta(pattern=r"\A/")]
    """The folder of the file system that was mounted there."""
    fs_type: str
    options: tuple[str, ...]
    """Of the mount."""
    super_options: tuple[str, ...]
    """Of the file system."""


@dataclass(frozen=True, kw_only=True)
class OriginRecord:
    """One origin."""

    ref: SnapshotRef
    """The member that it is put back to, as it was before."""
    origin: str
    """`RevertPlan.origin`."""
    device: Annotated[str, msgspec.Meta(pattern=r"\A/dev/")]
    """`RevertPlan.device`."""
    mounts: tuple[MountRecord, ...]
    """In the order in which they were made."""


@dataclass(frozen=True, kw_only=True)
class InplaceRecord:
    """An in-place restore that is under way or was cut short."""

    token: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    snapshot_id: str
    jobs: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """Whose snapshots are of these origins; the snapshot's own first. Who holds the lock of that one may go on."""
    holder: Process
    user: str
    began_at: datetime
    parts: Annotated[tuple[OriginRecord, ...], msgspec.Meta(min_length=1)]
    step: Step = "unmounting"
    """"unmounting": nothing is changed yet; "merging": all is unmounted; "merged": the data are back."""
    merged_at: datetime | None = None
    schema: int = SCHEMA

    @property
    def origins(self) -> str:
        """Its origins, for people."""
        return ", ".join(part.origin for part in self.parts)


def inplace_records(catalog: Catalog) -> tuple[InplaceRecord, ...]:
    """Return the in-place restores that are under way or were cut short, oldest first.

    Raises CatalogError for a record that cannot be read: what it says must not be passed over.
    """
    try:
        paths = sorted(path for path in _folder(catalog).iterdir() if path.suffix == ".json" and path.name[0] != ".")
    except (FileNotFoundError, PermissionError):
        return ()
    found = []
    for path in paths:
        try:
            record = decode(read_file(path), InplaceRecord, str(path))
        except NotFoundError:
            continue
        if path.stem != record.token:
            raise CatalogError(f"{path} does not belong here: by what is in it, it would be {record.token}.json")
        found.append(record)
    return tuple(sorted(found, key=lambda record: record.began_at))


def write_inplace(catalog: Catalog, record: InplaceRecord) -> None:
    """Store a record durably."""
    folder = _folder(catalog)
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise CatalogError(f"cannot make {folder}: {error.strerror}", hint=space_hint(error)) from None
    write_file(folder / f"{record.token}.json", encode(record))


def drop_inplace(catalog: Catalog, record: InplaceRecord) -> None:
    """Forget one that is done or undone; idempotent."""
    drop_file(_folder(catalog) / f"{record.token}.json")


def refuse_unfinished_inplace(catalog: Catalog, *jobs: str) -> None:
    """Raise BusyError if an origin of one of `jobs` is being put back, or that was cut short."""
    for record in inplace_records(catalog):
        if set(jobs) & set(record.jobs):
            raise _unfinished(record)


def refuse_inplace_target(catalog: Catalog, snapshot_id: str) -> None:
    """Raise BusyError if this very snapshot is being put back in place, or that was cut short."""
    for record in inplace_records(catalog):
        if record.snapshot_id == snapshot_id:
            raise _unfinished(record)


def _unfinished(record: InplaceRecord) -> BusyError:
    if is_alive(record.holder):
        return BusyError(
            f"{record.origins} is being put back in place to {record.snapshot_id} (pid {record.holder.pid})",
            hint="wait for it to end",
        )
    return BusyError(
        f"the restore in place of {record.snapshot_id} ({record.origins}) was cut short",
        hint=f"go on with it: snapmgr restore {record.snapshot_id} --in-place, or snapmgr doctor --fix",
    )


def _folder(catalog: Catalog) -> Path:
    return catalog.path / "inplace"
