"""Reads folders of the state directory: one JSON file a record, named for its content."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from msgspec import Struct

from snapmgr.catalog.manifest import Lease, RestoreRecord, Schedule, decode, encode
from snapmgr.contract.errors import CatalogError, MissingRequirementError, NotFoundError
from snapmgr.system.files import drop_file, read_file, write_file

if TYPE_CHECKING:
    from collections.abc import Callable

_Record = TypeVar("_Record", Lease, Schedule, RestoreRecord)


class Damaged(Struct, frozen=True, kw_only=True):
    """A file of the state directory that cannot be read."""

    path: Path
    problem: str


def read_records(
    folder: Path, kind: type[_Record], name_of: Callable[[_Record], str]
) -> tuple[list[_Record], list[Damaged]]:
    """Return the records in a folder, ordered by name, and the files that cannot be read."""
    records: list[_Record] = []
    damaged: list[Damaged] = []
    for name in sorted(names_in(folder)):
        path = folder / name
        try:
            record = decode(read_file(path), kind, str(path))
            require_name(path, f"{name_of(record)}.json")
            records.append(record)
        except NotFoundError:
            continue  # dropped meanwhile
        except CatalogError as error:
            damaged.append(Damaged(path=path, problem=error.message))
    return records, damaged


def require_name(path: Path, name: str) -> None:
    """Raise CatalogError if a file does not have the name that its content wants."""
    if path.name != name:
        raise CatalogError(f"{path} has a wrong name: by its contents it should be {name}")


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder but hidden ones. Raises as `folders_in`."""
    folders, others = folders_in(folder)
    return [*folders, *others]


def folders_in(folder: Path) -> tuple[list[str], list[str]]:
    """Return the names of the folders in a folder, and the other names in it (symlinks too), but no hidden ones.

    Raises MissingRequirementError without the privilege to read it, CatalogError if it cannot be read.
    """
    folders: list[str] = []
    others: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    (folders if entry.is_dir(follow_symlinks=False) else others).append(entry.name)
    except FileNotFoundError:
        return [], []
    except PermissionError:
        raise MissingRequirementError(
            f"no permission to read {folder}", hint="run as root, or set state_dir to a folder of yours"
        ) from None
    except OSError as error:
        raise CatalogError(f"cannot read {folder}: {error.strerror}", hint="see: snapmgr doctor") from None
    return folders, others


class RecordFolders:
    """The leases, schedules and restores of the state directory at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._leases = path / "leases"
        self._schedules = path / "schedules"
        self._restores = path / "restores"

    def leases(self) -> tuple[list[Lease], list[Damaged]]:
        """Return all leases, oldest first, and the files that cannot be read."""
        leases, damaged = read_records(self._leases, Lease, lambda lease: lease.id)
        return sorted(leases, key=lambda lease: lease.created_at), damaged

    def write_lease(self, lease: Lease) -> None:
        """Store a lease durably, before anything is attached."""
        write_file(self._leases / f"{lease.id}.json", encode(lease))

    def drop_lease(self, lease: Lease) -> None:
        """Remove a lease, after its attachment is gone; idempotent."""
        drop_file(self._leases / f"{lease.id}.json")

    def schedules(self) -> tuple[list[Schedule], list[Damaged]]:
        """Return the schedules, ordered by job, and the files that cannot be read."""
        return read_records(self._schedules, Schedule, lambda schedule: schedule.job)

    def write_schedule(self, schedule: Schedule) -> None:
        """Store a schedule durably."""
        write_file(self._schedules / f"{schedule.job}.json", encode(schedule))

    def drop_schedule(self, job: str) -> None:
        """Remove a schedule; idempotent."""
        drop_file(self._schedules / f"{job}.json")

    def restorations(self) -> tuple[list[RestoreRecord], list[Damaged]]:
        """Return the running and unfinished restores, oldest first, and the files that cannot be read."""
        restorations, damaged = read_records(self._restores, RestoreRecord, lambda record: record.token)
        return sorted(restorations, key=lambda record: record.began_at), damaged

    def write_restoration(self, record: RestoreRecord) -> None:
        """Store a restore durably, before anything is created."""
        write_file(self._restores / f"{record.token}.json", encode(record))

    def drop_restoration(self, record: RestoreRecord) -> None:
        """Remove the record of a restore that is complete or undone; idempotent."""
        drop_file(self._restores / f"{record.token}.json")
