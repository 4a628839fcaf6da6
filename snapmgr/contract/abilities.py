"""Defines the optional abilities of backends. A backend has an ability if it has all of its methods (isinstance).

Plugins import them from `snapmgr.api`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from snapmgr.contract.errors import SnapmgrError
    from snapmgr.contract.records import (
        AttachRecord,
        BenchStorage,
        ClientOptions,
        Gauge,
        Pool,
        Provisioned,
        ProvisionOrder,
        Reason,
        RevertPlan,
        SnapshotRef,
    )


@runtime_checkable
class CapacityReporting(Protocol):
    """A storage that loses snapshots, or cannot write origins or snapshots, when some space is full."""

    def gauges(self, pools: tuple[Pool, ...]) -> tuple[Gauge, ...]:
        """Return the usage of each space in `pools`: first the shared ones, then each snapshot's own.

        A shared space has the name that `Backend.headroom` gives it. Cheap: a few programs for each pool, whatever its
        size. A lost snapshot has ``valid=False``. A pool without any limit has no gauge. A missing pool raises
        StorageError.
        """


@runtime_checkable
class SpaceSharing(Protocol):
    """A `CapacityReporting` storage whose snapshots have no space of their own: a backup reads a pool's spaces once.

    No gauge belongs to a snapshot, and `Backend.headroom` of a volume is `gauges` of its pool: neither depends on which
    volume it is, or on a snapshot that was just taken.
    """

    shares_space: ClassVar[Literal[True]]


@runtime_checkable
class BatchDeleting(Protocol):
    """A storage that deletes many snapshots for little more than the cost of one."""

    def delete_batch(
        self, refs: tuple[SnapshotRef, ...], *, wait: Literal["name", "space"] = "name"
    ) -> tuple[SnapmgrError | None, ...]:
        """Delete snapshots as `Backend.delete` deletes each; return for each its error, None if it is gone durably.

        An error of one does not keep the others; one of a pool is that of each snapshot in it. `refs` are about 100 at
        most; with "space", of names that are gone already, any number.
        """


@runtime_checkable
class AutoExtending(Protocol):
    """A storage that can extend a snapshot's own space."""

    def auto_extend(self, ref: SnapshotRef) -> str | None:
        """Extend a snapshot's own space if it is filling up and the configuration allows it.

        Returns the action in words, None if it was not necessary. Raises StorageError without space for the extension,
        NotFoundError if the snapshot is gone.
        """


@runtime_checkable
class ScratchAttaching(Protocol):
    """A storage whose attachments write to scratch space, which can be full while writes still seem to succeed."""

    def attachment_problem(self, record: AttachRecord) -> Reason | None:
        """Return why data read through an attachment cannot be trusted; None if they can."""


@runtime_checkable
class FolderCloning(Protocol):
    """A storage that clones a folder in one call, sharing all its data."""

    def clone_folder(self, source: str, target: str) -> None:
        """Clone the folder `source` to `target` on the same storage; `target` does not exist, its parent folder does.

        Nobody writes to `source` during the call. A call that fails or is interrupted leaves no `target`, or one that
        the next such call removes. Owners, modes, times and holes are the source's. Raises StorageError if
        the storage cannot (full, quota, `target` exists), NotFoundError if `source` is missing.
        """


class ClientMount(Protocol):
    """A private mount by a storage's client program."""

    @property
    def path(self) -> str:
        """The requested folder, seen through this mount."""

    @property
    def point(self) -> str:
        """The mount point."""

    @property
    def options(self) -> ClientOptions:
        """Its mount options."""

    def counters(self) -> dict[str, float]:
        """Return the client's counters since it was mounted; names are the client's ("juicefs_…"), labels in
        braces behind them."""

    def settle(self, timeout_s: float, tell: Callable[[int], None] | None = None) -> None:
        """Wait until everything written through it is in the storage; `tell` is called with the remaining bytes.

        Raises StorageError after `timeout_s`.
        """

    def warm_up(self, path: str) -> None:
        """Read a folder of this mount into the cache."""


@runtime_checkable
class Remounting(Protocol):
    """A storage behind a client program with its own cache, which can be mounted again privately with other options."""

    def client_mount(self, path: str, options: ClientOptions) -> AbstractContextManager[ClientMount]:
        """Mount the storage that holds `path` (a folder in a mount of it) again until the context ends.

        It is mounted in a namespace or folder of our own; after a SIGKILL `doctor` cleans it up. The end of the context
        waits until everything is uploaded; if that fails, the local cache folder is kept and named in the StorageError.
        """


@runtime_checkable
class AlterationCheck(Protocol):
    """A storage that must read a whole snapshot to find out whether somebody changed it; other inventories know."""

    def refuse_altered(self, ref: SnapshotRef) -> None:
        """Raise AlteredError if the snapshot was changed after it was taken. One that is gone is no error."""


@runtime_checkable
class Revertible(Protocol):
    """A storage that can restore an origin in place from one of its snapshots.

    A `token` (16 hex digits) names one in-place restore; the core stores it on disk before `begin_revert`. The core
    unmounts the origin before, and mounts it again afterwards.
    """

    def revert_plan(self, ref: SnapshotRef) -> RevertPlan:
        """Return the consequences; changes nothing. Raises NotFoundError if the snapshot or its origin is gone."""

    def begin_revert(self, ref: SnapshotRef, token: str) -> None:
        """Start the in-place restore, or resume it; idempotent, returns soon.

        Raises InUseError if the origin or the snapshot is open, StorageError if the storage refuses.
        """

    def revert_state(self, ref: SnapshotRef, token: str) -> Literal["none", "merging", "done", "failed"]:
        """Return its progress, in any process and after any crash or reboot; "none": not started."""

    def cancel_revert(self, ref: SnapshotRef, token: str) -> None:
        """Remove the preparations of one whose state is "none"; idempotent."""

    def finish_revert(self, ref: SnapshotRef, token: str) -> SnapshotRef | None:
        """After "done" remove leftovers, and return the snapshot in its new form; None if it was consumed.

        Idempotent.
        """


@runtime_checkable
class Provisioner(Protocol):
    """A storage that can be created on a blank block device, for the benchmark and for tests."""

    def provision(self, device: str, order: ProvisionOrder) -> AbstractContextManager[Provisioned]:
        """Create this storage on `device` ("/dev/loop3") and mount it at `order.point` until the context ends.

        The core has made sure that the device holds no data. All options that affect speed are passed to programs
        explicitly and recorded in `commands`. Removing is idempotent and leaves nothing active; after a SIGKILL
        `unprovision` removes the rest. Raises StorageError (too small), MissingRequirementError.
        """

    def unprovision(self, device: str, order: ProvisionOrder) -> None:
        """Unmount, deactivate and remove everything that a `provision` with these arguments left.

        Idempotent, in any process. The device need not be blank afterwards, but it is not in use.
        """


@runtime_checkable
class Benchmarked(Protocol):
    """A `Provisioner` whose storages the benchmark offers by their names, beside those that come with snapmgr."""

    @classmethod
    def bench_storages(cls) -> tuple[BenchStorage, ...]:
        """Return its storages."""
