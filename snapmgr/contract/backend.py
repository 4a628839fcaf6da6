"""Defines the protocols between the core and a storage backend.

A backend is a class registered in the entry-point group ``snapmgr.backends``. snapmgr constructs it with its parsed
``Config``, a `Runner` for external programs and a `Mounter` for private mounts, and calls nothing outside this file's
protocols. The docstrings here *are* the contract; `snapmgr.testing` checks it. ``docs/how-to/write-a-backend.md`` has
an example.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager
    from types import TracebackType

    from snapmgr.contract.records import (
        Attachment,
        AttachRecord,
        Capabilities,
        Completed,
        Found,
        Intent,
        Mount,
        NotMine,
        Pool,
        Reason,
        Reservoir,
        Shot,
        SnapshotRef,
        Target,
        Usage,
        Volume,
    )

API_VERSION = 1


class Runner(Protocol):
    """Runs external programs: closed stdin, LC_ALL=C.UTF-8, a clean environment.

    Backends start programs only with it.
    """

    def run(
        self,
        argv: Sequence[str],
        *,
        ok: tuple[int, ...] = (0,),
        timeout_s: float | None = 60.0,
        secrets: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
        abandon: bool = False,
    ) -> Completed:
        """Run `argv` to its end and return its output.

        Args:
            argv: program and arguments; never a shell line, never a secret.
            ok: exit codes that mean success.
            timeout_s: seconds until the program is ended (terminated, then killed) and CommandError is raised.
            secrets: texts to be replaced by "***" in any error.
            env: variables added to the clean environment.
            abandon: after the time limit leave the program running instead of ending it, as a killed ``lvcreate`` may
                leave its origin suspended.

        Raises MissingRequirementError if the program is missing, CommandError for other exit codes or a timeout.
        """

    def hold(self, argv: Sequence[str]) -> Held:
        """Start a process that waits, and becomes `argv` on a signal from us, so that the start takes no time then.

        Raises MissingRequirementError if the program is missing, CommandError if it cannot be started.
        """


class Held(Protocol):
    """A program that waits to begin. A context manager: leaving it ends a program that `run` never started.

    It also ends, having done nothing, when the process that started it is gone. Once it runs, it is not ended.
    """

    def run(self) -> Completed:
        """Let it begin, once, wait for its end without a limit, and return its output.

        Raises CommandError for any exit code but 0.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class PrivateMount(Protocol):
    """A mount that no other process sees and that dies with its descriptor."""

    @property
    def fd(self) -> int:
        """Descriptor of the mount's root folder."""

    @property
    def path(self) -> str:
        """A path to it ("/proc/self/fd/N"), valid in this process and in children that inherited `fd`."""


class Mounter(Protocol):
    """Mounts file systems for a backend."""

    def private(self, source: str, fs_type: str, options: tuple[str, ...] = ()) -> AbstractContextManager[PrivateMount]:
        """Mount `source` detached from the mount tree until the context ends; nothing is left even after SIGKILL.

        Raises MissingRequirementError without the privilege (CAP_SYS_ADMIN), StorageError if the mount fails.
        """

    def mounts(self) -> tuple[Mount, ...]:
        """Return the current mount table of this process."""


class Armed(Protocol):
    """A snapshot that is ready to be taken: everything slow is done.

    A context manager. Leaving it undoes the preparation and closes descriptors. If `launched` is set, the manifest
    decides about the snapshots, and leaving only closes descriptors. It never waits for the storage.
    """

    intents: tuple[Intent, ...]
    stall_s: float
    """Forecast of how long `fire` takes."""
    fds: tuple[int, ...]
    """Descriptors that `fire` needs; the helper process closes all others."""
    launched: bool
    """Set by the core, in its own process, just before it makes the helper fire."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def sync(self) -> None:
        """Flush the volumes' dirty data. Called repeatedly until it is quick, as the last step before the lock."""

    def fire(self, deadline: float) -> tuple[Shot, ...]:
        """Take the snapshots. This is the only call under a lock; it runs in a helper process, which may hang in it.

        Args:
            deadline: time.monotonic() after which no further member may be started.

        Returns one shot for each intent, in their order. Use system calls rather than programs where possible. Raises
        FireError, which carries the members already made.
        """


@runtime_checkable
class Announcing(Protocol):
    """Optional, for an `Armed` whose storage reports the new snapshots' ids late; the lock must not wait for them."""

    fired: Callable[[], None]
    """Set by the core in the helper. `fire` calls it once its last storage call has returned without an error."""


@runtime_checkable
class Readying(Protocol):
    """Optional, for an `Armed` that prepares something in the helper process, such as starting a program."""

    def get_ready(self) -> None:
        """Prepare. Called once in the helper, before any lock; never raises: `fire` reports failures."""


class Backend(Protocol):
    """One kind of storage. Several processes may call its methods concurrently, in any order."""

    name: ClassVar[str]
    """As in the entry point: lower case, "btrfs"."""
    api_version: ClassVar[int]
    """The `API_VERSION` it was written for; others are refused."""
    Config: ClassVar[type[Any]]
    """A frozen dataclass or msgspec.Struct with defaults; parsed from ``[backend.NAME]``, unknown keys refused."""

    def __init__(self, config: Any, runner: Runner, mounter: Mounter) -> None:  # noqa: ANN401 - the backend's own Config
        """Store the arguments; touch nothing."""

    def missing(self) -> tuple[Reason, ...]:
        """Return all requirements that are missing on this machine; empty if the backend can work. Never raises."""

    def locate(self, target: Target) -> Volume | NotMine:
        """Find the volume that holds `target`, or say why this backend cannot snapshot it. Changes nothing.

        `excluded` names every nested subvolume and nested mount, which a snapshot would silently leave out.
        """

    def capabilities(self, volumes: tuple[Volume, ...]) -> Capabilities:
        """Return the capabilities for all of `volumes` together."""

    def headroom(self, volume: Volume) -> tuple[Reservoir, ...]:
        """Return the reservoirs that snapshots of `volume` can fill up."""

    def arm(self, volumes: tuple[Volume, ...], snapshot_id: str) -> Armed:
        """Prepare a snapshot of `volumes` outside of any lock: checks, space, names, everything slow.

        `snapshot_id` is unique and consists of letters, digits, ".", "-" and "_". Raises StorageError if a snapshot
        would fail, MissingRequirementError if a privilege is missing.
        """

    def settle(self, refs: tuple[SnapshotRef, ...], timeout_s: float) -> None:
        """After the lock, wait until the snapshots would survive a power cut and are read-only.

        Idempotent, and possible in another process, as it also completes a run that crashed after its proof (therefore
        it is not a method of `Armed`). Raises NotFoundError if one is gone, StorageError after `timeout_s`.
        """

    def inventory(self, pools: tuple[Pool, ...], *, notes: bool = True) -> tuple[Found, ...]:
        """Return everything of ours in `pools`: snapshots, attachments, debris; also when the origin is gone.

        A missing pool raises StorageError, because unreachable storage is not empty storage. Objects that are not
        provably ours (no mark, foreign ids, received from elsewhere) are not returned. Without `notes` a snapshot's may
        be missing, so that thousands of them need not be read.
        """

    def annotate(self, ref: SnapshotRef, note: bytes) -> None:
        """Store `note` (the manifest, at most 64 KiB) beside the snapshot, durably. The snapshot does not change."""

    def attach(self, record: AttachRecord) -> Attachment:
        """Make the snapshot reachable; with `record.writable` as a clone, so that the original never changes.

        Everything that is created has `record.id` in its name. Raises NotFoundError if the snapshot is gone or has
        another id, AlteredError if it was changed after it was taken.
        """

    def detach(self, record: AttachRecord) -> None:
        """Remove what `attach` created; idempotent; works after a reboot, after a crash, and if it is already gone.

        The core has unmounted it before. Only objects that provably belong to `record` are removed.
        """

    def delete(self, ref: SnapshotRef, *, wait: Literal["name", "space"] = "name") -> None:
        """Delete the snapshot; wait until its name is gone durably, or ("space") its space is free again.

        Idempotent: a snapshot that is already gone is not an error. Raises StorageError if something else has its name,
        InUseError if it is attached, mounted or has something mounted in it.
        """

    def repair(self, found: Found) -> None:
        """Remove or repair debris that `inventory` returned; idempotent."""

    def usage(self, ref: SnapshotRef, *, exact: bool = False) -> Usage:
        """Return the space that the snapshot takes; cheap unless `exact`. Raises NotFoundError if it is gone."""
