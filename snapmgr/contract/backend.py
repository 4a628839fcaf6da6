"""The protocols between the core and a storage backend.

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
    """Runs external programs: closed stdin, LC_ALL=C.UTF-8, a clean environment. Backends use nothing else for it."""

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
        """Run `argv` to its end and return what it printed.

        Args:
            argv: program and arguments; never a shell line, never a secret.
            ok: exit codes that are no error.
            timeout_s: seconds until the program is ended (terminated, then killed) and CommandError is raised.
            secrets: texts to be replaced by "***" in any error.
            env: variables added to the clean environment.
            abandon: past the time limit leave the program alone instead of ending it: a killed ``lvcreate`` may leave
                its origin suspended.

        Raises MissingRequirementError if there is no such program, CommandError for other exit codes or a timeout.
        """

    def hold(self, argv: Sequence[str]) -> Held:
        """Start a process that becomes `argv` only when it is told to: what starting one takes is done before.

        Raises MissingRequirementError if there is no such program, CommandError if it cannot be started.
        """


class Held(Protocol):
    """A program that waits to begin. A context manager: one that was never told to begin ends when that is left.

    It also ends, having done nothing, when the process that holds it back is gone. Once it runs nobody ends it.
    """

    def run(self) -> Completed:
        """Let it begin, once, and return what it printed. Waits as long as it takes; who waits for us has a limit.

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

        Raises MissingRequirementError without the right (CAP_SYS_ADMIN), StorageError if the mount fails.
        """

    def mounts(self) -> tuple[Mount, ...]:
        """Return this process's mount table, fresh."""


class Armed(Protocol):
    """A snapshot that is ready to fire: everything slow is done.

    A context manager. Leaving it undoes the preparation and closes descriptors, unless `launched` is set: then what
    exists is a matter of the manifest, and leaving only closes descriptors. It never waits for the storage.
    """

    intents: tuple[Intent, ...]
    stall_s: float
    """Forecast of how long `fire` takes."""
    fds: tuple[int, ...]
    """Descriptors that `fire` needs: the helper process closes all others."""
    launched: bool
    """Set by the core, in its own process, just before it tells the helper to fire."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def sync(self) -> None:
        """Flush the volumes' dirty data. Called again and again until it is quick; the last thing before the lock."""

    def fire(self, deadline: float) -> tuple[Shot, ...]:
        """Take the snapshots: the only call made under a lock, in a helper process that may hang in it.

        Args:
            deadline: time.monotonic() after which a further member must not be begun.

        Returns one shot for each intent, in their order. No program is started where a system call does it. Raises
        FireError, which carries the members already made.
        """


@runtime_checkable
class Announcing(Protocol):
    """Optional, for an `Armed`: its storage tells the new snapshots' ids late, and no lock is to wait for that."""

    fired: Callable[[], None]
    """Set by the core in the helper. `fire` calls it once its last storage call has returned without an error."""


@runtime_checkable
class Readying(Protocol):
    """Optional, for an `Armed`: something can be done in the helper process beforehand, such as starting a program."""

    def get_ready(self) -> None:
        """Do it. Called once in the helper, before there is any lock; never raises: what failed, `fire` says."""


class Backend(Protocol):
    """One kind of storage. Methods may be called in any order and by several processes at once."""

    name: ClassVar[str]
    """As in the entry point: lower case, "btrfs"."""
    api_version: ClassVar[int]
    """The `API_VERSION` it was written for; another one is refused."""
    Config: ClassVar[type[Any]]
    """A frozen dataclass or msgspec.Struct with defaults; parsed from ``[backend.NAME]``, unknown keys refused."""

    def __init__(self, config: Any, runner: Runner, mounter: Mounter) -> None:  # noqa: ANN401 - the backend's own Config
        """Store the arguments; touch nothing."""

    def missing(self) -> tuple[Reason, ...]:
        """Return all that this machine lacks for this backend, at once; empty when it can work. Never raises."""

    def locate(self, target: Target) -> Volume | NotMine:
        """Find the volume that holds `target`, or say why this backend cannot snapshot it. Changes nothing.

        `excluded` names every nested subvolume and nested mount: what a snapshot would silently leave out.
        """

    def capabilities(self, volumes: tuple[Volume, ...]) -> Capabilities:
        """Return what holds for all of `volumes` together."""

    def headroom(self, volume: Volume) -> tuple[Reservoir, ...]:
        """Return what can fill up because of snapshots of `volume`."""

    def arm(self, volumes: tuple[Volume, ...], snapshot_id: str) -> Armed:
        """Prepare a snapshot of `volumes`, outside of any lock: checks, space, names, everything slow.

        `snapshot_id` is unique and consists of letters, digits, ".", "-" and "_". Raises StorageError if a snapshot
        would fail, MissingRequirementError if a right is missing.
        """

    def settle(self, refs: tuple[SnapshotRef, ...], timeout_s: float) -> None:
        """After the lock: return when the snapshots would survive a power cut and are read-only.

        Idempotent, and possible in another process: a run that crashed after its proof is completed by it (which is why
        this is no method of `Armed`). Raises NotFoundError if one is gone, StorageError after `timeout_s`.
        """

    def inventory(self, pools: tuple[Pool, ...]) -> tuple[Found, ...]:
        """Return everything of ours in `pools`: snapshots, attachments, debris; also when the origin is gone.

        A pool that is not there now raises StorageError: an unreachable storage is not an empty one. What is not
        provably ours (no mark, foreign ids, received from elsewhere) is not returned.
        """

    def annotate(self, ref: SnapshotRef, note: bytes) -> None:
        """Store `note` (the manifest, at most 64 KiB) beside the snapshot, durably; its data do not change."""

    def attach(self, record: AttachRecord) -> Attachment:
        """Make the snapshot reachable. With `record.writable` on a clone, and the original never changes.

        Everything that is made bears `record.id`. Raises NotFoundError if the snapshot is gone or has another id,
        AlteredError if it was changed after it was taken.
        """

    def detach(self, record: AttachRecord) -> None:
        """Remove what `attach` made; idempotent; works after a reboot, half-made or already gone. The core has
        unmounted before. Only what provably came from `record` is removed."""

    def delete(self, ref: SnapshotRef, *, wait: Literal["name", "space"] = "name") -> None:
        """Delete the snapshot: return when its name is gone durably, or ("space") when its space is free again.

        Idempotent: what is gone already is no error. Raises StorageError if something else has its name, InUseError if
        it is attached, mounted or has something mounted in it.
        """

    def repair(self, found: Found) -> None:
        """Remove or mend debris that `inventory` returned; idempotent."""

    def usage(self, ref: SnapshotRef, *, exact: bool = False) -> Usage:
        """Return what the snapshot costs: cheap unless `exact`. Raises NotFoundError if it is gone."""
