"""Optional abilities of a backend: one that has an ability has all of its methods. The core asks by isinstance.

Plugins import them from `snapmgr.api`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from snapmgr.contract.records import (
        AttachRecord,
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
    """A storage whose snapshots are lost, or whose origins cannot be written, when something runs full."""

    def gauges(self, pools: tuple[Pool, ...]) -> tuple[Gauge, ...]:
        """Return how full everything in `pools` is that can run full: first what all share, then each snapshot's own.

        Cheap: a few programs for each pool, whatever it holds. A snapshot that was lost has ``valid=False``. A pool
        that is not there raises StorageError.
        """

    def auto_extend(self, ref: SnapshotRef) -> str | None:
        """Give a snapshot more room if it is filling up and the configuration allows it; return in words what was done.

        None if nothing was to be done. Raises StorageError if there is no room to give, NotFoundError if it is gone.
        """


@runtime_checkable
class ScratchAttaching(Protocol):
    """A storage whose attachments write to scratch space, which can run full while writes still seem to succeed."""

    def attachment_problem(self, record: AttachRecord) -> Reason | None:
        """Return why what is read through an attachment is not to be believed; None if it is as it should be."""


@runtime_checkable
class FolderCloning(Protocol):
    """A storage that clones any folder in it, in one call, sharing all its data."""

    def clone_folder(self, source: str, target: str) -> None:
        """Clone the folder `source` to `target`, on the same storage: a path that does not exist in a folder that does.

        Nobody writes to `source` meanwhile. What fails or is interrupted leaves no `target`, or one that is removed by
        the same call when it is tried again. Owners, modes, times and holes are the source's. Raises StorageError if
        the storage cannot (full, quota, `target` exists), NotFoundError if there is no `source`.
        """


class ClientMount(Protocol):
    """A mount of a storage's client program that nobody else uses."""

    @property
    def path(self) -> str:
        """The folder that was asked for, seen through this mount."""

    @property
    def point(self) -> str:
        """Where the mount is."""

    @property
    def options(self) -> ClientOptions:
        """What it was mounted with."""

    def counters(self) -> dict[str, float]:
        """Return the client's counters now, since it was mounted; names are the client's ("juicefs_…"), labels in
        braces behind them."""

    def settle(self, timeout_s: float, tell: Callable[[int], None] | None = None) -> None:
        """Return when all that was written through it is in the storage itself; `tell` is called with the bytes that
        are left. Raises StorageError after `timeout_s`."""

    def warm_up(self, path: str) -> None:
        """Read a folder, a path of this mount, into the cache."""


@runtime_checkable
class Remounting(Protocol):
    """A storage behind a client program with a cache of its own: mounted once more, privately, with other options."""

    def client_mount(self, path: str, options: ClientOptions) -> AbstractContextManager[ClientMount]:
        """Mount the storage that holds `path` (a folder in a mount of it) once more until the context ends.

        In a namespace or folder of our own; what a SIGKILL leaves of it is debris that `doctor` clears. Leaving it
        waits until all is uploaded; if that fails the local cache folder is kept, and named in the StorageError.
        """


@runtime_checkable
class Revertible(Protocol):
    """A storage that can put an origin back, in its own place, to one of its snapshots.

    A `token` (16 hex digits) names one such reversion; the core has it on disk before `begin_revert`. The core unmounts
    the origin before and mounts it again afterwards.
    """

    def revert_plan(self, ref: SnapshotRef) -> RevertPlan:
        """Return what it would mean. Changes nothing. Raises NotFoundError if the snapshot or its origin is gone."""

    def begin_revert(self, ref: SnapshotRef, token: str) -> None:
        """Begin to put the origin back, or push on what goes on already; idempotent, and returns soon.

        Raises InUseError if the origin or the snapshot is open, StorageError if the storage refuses.
        """

    def revert_state(self, ref: SnapshotRef, token: str) -> Literal["none", "merging", "done", "failed"]:
        """Return how far it is, in any process and after any crash or reboot; "none": it has not begun."""

    def cancel_revert(self, ref: SnapshotRef, token: str) -> None:
        """Remove what was prepared for one whose state is "none"; idempotent."""

    def finish_revert(self, ref: SnapshotRef, token: str) -> SnapshotRef | None:
        """After "done" remove what is left over, and return the snapshot as it is now; None if it is used up.

        Idempotent: called again it returns the same.
        """


@runtime_checkable
class Provisioner(Protocol):
    """A storage that can be made anew on a blank block device: for the benchmark, and for tests."""

    def provision(self, device: str, order: ProvisionOrder) -> AbstractContextManager[Provisioned]:
        """Make this storage on `device` ("/dev/loop3") and mount it at `order.point`; the context's end takes it down.

        The device holds nothing that anybody wants: the core has made sure. Programs are given all options that decide
        about speed, and `commands` says which. Taking down is idempotent and leaves nothing active; what a SIGKILL
        leaves is removed by `unprovision`. Raises StorageError (too small), MissingRequirementError.
        """

    def unprovision(self, device: str, order: ProvisionOrder) -> None:
        """Unmount, deactivate and remove whatever an earlier `provision` with these arguments left; idempotent, in any
        process. The device need not be blank afterwards, but nothing holds it."""
