"""Reads and writes the state directory: manifests, verifications, leases and locks.

::

    STATE/snapshots/ID/manifest.json    the manifest; its folder carries the readers' and deleters' flock
    STATE/snapshots/ID/verified.json    the last verification, if any
    STATE/leases/LEASE.json             who uses which snapshot
    STATE/schedules/JOB.json            when a job has to run, as `snapmgr schedule` installed it
    STATE/locks/JOB.lock                locked (flock) by the active run of a job (`snapmgr.catalog.joblock`)
    STATE/locks/number                  the last `Manifest.number`, if there are many snapshots
    STATE/frozen/PID                    a stopped server process, and the process that resumes it
    STATE/appliers/PID                  a replica with stopped appliers, and the process that starts them again
    STATE/machine                       the machine that it belongs to: two machines must not share it
    STATE/restores/TOKEN.json           an unfinished restore (`snapmgr.restore.destination`)
    STATE/inplace/TOKEN.json            an unfinished in-place restore (`snapmgr.catalog.inplace`)
    STATE/snapshots/ID/tool.log         output of the tool of a physical backup
    STATE/tool-logs/JOB.log             the same for the active or last failed run
    STATE/index                         summaries of the manifests (`snapmgr.catalog.index`); may be removed at any time
    STATE/capacity/POOL.json            samples of the storage's capacity (`snapmgr.capacity.read`)

Every file is replaced atomically (`snapmgr.system.files`): a crash leaves the old or the new content.
"""

from __future__ import annotations

import fcntl
import os
import re
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from snapmgr.catalog.entry import Entry
from snapmgr.catalog.manifest import UNFINISHED, Lease, Manifest, Verification, decode, encode
from snapmgr.catalog.recordfolder import Damaged, RecordFolders, names_in
from snapmgr.catalog.statedir import claim, require_sound
from snapmgr.contract.errors import (
    CatalogError,
    InUseError,
    MissingRequirementError,
    NotFoundError,
    SnapmgrError,
)
from snapmgr.system.files import is_abandoned, read_file, space_hint, sync_folder, write_file, write_files
from snapmgr.system.probe import require_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from datetime import datetime

    from snapmgr.catalog.index import Index
    from snapmgr.catalog.joblock import Held
    from snapmgr.catalog.summary import Summary
    from snapmgr.contract.records import Pool

__all__ = ["Catalog", "Entry", "attached_error"]

_NUMBER = "number"
# Files whose writer was killed before the rename.
_BEGUN = r"\.(manifest|verified)\.json\.\d+"


class _Numbered(msgspec.Struct):
    number: int = 0


class Catalog(RecordFolders):
    """The state directory at `path`; created (0700) when first written to.

    Raises MissingRequirementError without the privilege to read it, CatalogError if others could write to it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._snapshots = path / "snapshots"
        self._locks = path / "locks"
        self.frozen = path / "frozen"
        """Folder of the records of frozen servers (`snapmgr.mysql.lock.freeze`)."""
        self.appliers = path / "appliers"
        """Folder of the records of replicas with stopped appliers (`snapmgr.mysql.lock.applier`)."""
        self._answers = False
        self._index: Index | None = None
        self._held: dict[str, Held] = {}
        self._number = 0
        require_sound(path)

    def require_answer(self) -> None:
        """Raise StorageError if the file system of the state directory hangs; checked once."""
        if not self._answers:
            require_answer(str(self.path))
            self._answers = True

    def make(self) -> None:
        """Create missing folders. Raises CatalogError or MissingRequirementError, StorageError if it hangs."""
        self.require_answer()
        for folder in (self.path, self._snapshots, self._leases, self._schedules, self._restores, self._locks):
            try:
                folder.mkdir(mode=0o700, parents=folder is self.path, exist_ok=True)
            except PermissionError:
                raise MissingRequirementError(
                    f"no permission to create {folder}", hint="run as root, or set state_dir to a folder of yours"
                ) from None
            except OSError as error:
                raise CatalogError(f"cannot create {folder}: {error.strerror}", hint=space_hint(error)) from None
        require_sound(self.path)
        try:
            claim(self.path)
        except OSError as error:
            raise CatalogError(f"cannot write to {self.path}: {error.strerror}", hint=space_hint(error)) from None
        begun = [self._leases / name for name in os.listdir(self._leases) if name[0] == "." and ".json." in name]
        begun += [self.path / name for name in os.listdir(self.path) if name.startswith(".machine.")]
        for path in begun:
            if is_abandoned(path):
                path.unlink(missing_ok=True)

    # ---- snapshots

    def summaries(
        self, job: str | None = None, until: Callable[[Summary], bool] | None = None
    ) -> tuple[list[Summary], list[Damaged]]:
        """Return all snapshots (or those of `job`) in short, oldest first, and the files that cannot be read.

        Much quicker than `entries`, and as true: it reads the manifests that changed since they were summarized.
        With `until` only down from the newest, to the first for which it returns True.
        """
        if self._index is None:
            from snapmgr.catalog.index import Index  # noqa: PLC0415 - a backup can do without

            self._index = Index(self.path / "index", self._snapshots, self._load)
        return self._index.look(job, until)

    def names(self) -> list[str]:
        """Return the names in the folder of the snapshots: quick, but not every name is a snapshot's id."""
        return names_in(self._snapshots)

    def entries(self, job: str | None = None) -> tuple[list[Entry], list[Damaged]]:
        """Return all snapshots (or those of `job`), oldest first, and the files that cannot be read."""
        entries: list[Entry] = []
        damaged: list[Damaged] = []
        for name in names_in(self._snapshots):
            if job is not None and not name.startswith(job + "."):
                continue
            try:
                entry, problem = self._load(name)
            except NotFoundError:
                continue  # deleted meanwhile, or a crash before its first manifest
            except CatalogError as error:
                damaged.append(Damaged(path=self._snapshots / name, problem=error.message))
                continue
            if problem is None:
                entries.append(entry)
            else:
                # It is unknown whether it was verified, so retention must not see it.
                damaged.append(Damaged(path=self._snapshots / name, problem=problem))
        entries.sort(key=_order)
        return entries, damaged

    def next_number(self, now: datetime) -> int:
        """Return the next `Manifest.number`: at least the time, to be above the numbers of a lost state directory."""
        from snapmgr.catalog.joblock import next_number  # noqa: PLC0415 - readers need no number

        path = self._locks / _NUMBER
        self._number = next_number(path, self._snapshots, int(now.timestamp()), self._highest_number)
        return self._number

    def _highest_number(self) -> tuple[int, int]:
        """Return the highest number and the count of snapshots: 0 if one cannot be read, as it may be restored."""
        found, damaged = self.summaries()
        numbers = [one.number for one in found]
        for one in damaged:
            with suppress(SnapmgrError, msgspec.DecodeError, UnicodeDecodeError):
                data = read_file(one.path / "manifest.json")
                numbers.append(msgspec.json.decode(data, type=_Numbered).number)
        return max(numbers, default=0), len(numbers) if len(numbers) == len(found) + len(damaged) else 0

    def load(self, snapshot_id: str) -> Entry:
        """Return one snapshot; a damaged verification is ignored.

        Raises NotFoundError, or CatalogError if its manifest is damaged.
        """
        return self._load(snapshot_id)[0]

    def load_many(self, snapshot_ids: Iterable[str]) -> tuple[list[Entry], list[SnapmgrError]]:
        """Return snapshots as `load` does each, and the errors of those that cannot be read."""
        entries: list[Entry] = []
        errors: list[SnapmgrError] = []
        for snapshot_id in snapshot_ids:
            try:
                entries.append(self.load(snapshot_id))
            except SnapmgrError as error:
                errors.append(error)
        return entries, errors

    def _load(self, snapshot_id: str) -> tuple[Entry, str | None]:
        """Return one snapshot, and the error of its verification, if any."""
        folder = self._snapshots / snapshot_id
        if folder.is_symlink():
            raise CatalogError(f"{folder} is a symlink", hint="make it a plain folder")
        manifest = decode(read_file(folder / "manifest.json"), Manifest, str(folder / "manifest.json"))
        if manifest.id != snapshot_id or not snapshot_id.startswith(f"{manifest.job}."):
            whose = f"{manifest.id} of job {manifest.job}"
            raise CatalogError(f"{folder / 'manifest.json'} is the manifest of {whose}, not of {snapshot_id}")
        path = folder / "verified.json"
        try:
            return Entry(manifest=manifest, verification=decode(read_file(path), Verification, str(path))), None
        except NotFoundError:
            return Entry(manifest=manifest, verification=None), None
        except CatalogError as error:
            return Entry(manifest=manifest, verification=None), error.message

    def resolve(self, text: str, tell: Callable[[str], None] = lambda _line: None) -> Entry:
        """Given an id, a unique start of one or of its random part, or a name of the newest one, return the snapshot.

        "latest" and "JOB@latest" are the newest READY one that did not fail its verification: `tell` gets a line about
        newer ones that cannot be used. "latest-verified" and "JOB@latest-verified" are the newest VERIFIED one. Raises
        NotFoundError, or ConfigError if several fit.
        """
        from snapmgr.catalog.latest import resolve  # noqa: PLC0415 - a backup can do without

        return self.load(resolve(text, self.names, self.summaries, tell))

    def write(self, manifest: Manifest) -> None:
        """Store a manifest durably. Raises CatalogError, with the old content still in place."""
        folder = self._snapshots / manifest.id
        data = encode(manifest)  # before the folder exists: a name that is not UTF-8 must not leave it empty
        self._begin((manifest,))
        new = True
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            new = not (folder / "manifest.json").exists()  # an earlier try found no room
        except OSError as error:
            raise CatalogError(f"cannot create {folder}: {error.strerror}", hint=space_hint(error)) from None
        if new and manifest.number != self._number:  # an adopted one
            (self._locks / _NUMBER).unlink(missing_ok=True)
        write_file(folder / "manifest.json", data)
        if new:
            sync_folder(self._snapshots)
        self._end((manifest,))

    def write_many(self, manifests: Iterable[Manifest]) -> dict[str, CatalogError]:
        """Store manifests that have been stored before, durably; return the error of each that could not be, by id."""
        paths = {self._snapshots / one.id / "manifest.json": one for one in manifests}
        self._begin(paths.values())
        errors = write_files({path: encode(one) for path, one in paths.items()})
        self._end(one for path, one in paths.items() if path not in errors)
        return {paths[path].id: error for path, error in errors.items()}

    def _begin(self, manifests: Iterable[Manifest]) -> None:
        """Note what is about to become unfinished, for `leave_swept`."""
        for one in manifests:
            if one.job in self._held and one.state in UNFINISHED:
                self._held[one.job].will_be_unfinished(one.id)

    def _end(self, manifests: Iterable[Manifest]) -> None:
        for one in manifests:
            if one.job in self._held and one.state not in UNFINISHED:
                self._held[one.job].unfinished.discard(one.id)
                self._held[one.job].pools |= dict.fromkeys(ref.pool for ref in one.refs)

    def write_verification(self, snapshot_id: str, verification: Verification) -> None:
        """Store the result of a verification durably."""
        write_file(self._snapshots / snapshot_id / "verified.json", encode(verification))

    def forget(self, *snapshot_ids: str) -> None:
        """Remove manifests, after their storage is gone; idempotent. Files of others beside them stay."""
        for snapshot_id in snapshot_ids:
            folder = self._snapshots / snapshot_id
            with suppress(FileNotFoundError):
                begun = [name for name in os.listdir(folder) if re.fullmatch(_BEGUN, name)]
                # The manifest last, so that the snapshot is known until then.
                for name in (*begun, "tool.log", "verified.json", "manifest.json"):
                    (folder / name).unlink(missing_ok=True)
                with suppress(OSError):
                    folder.rmdir()
            for held in self._held.values():
                held.unfinished.discard(snapshot_id)
        if snapshot_ids:
            sync_folder(self._snapshots)

    def tool_log(self, job: str) -> Path:
        """Return the path for the tool's output in a job's active run."""
        folder = self.path / "tool-logs"
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise CatalogError(f"cannot create {folder}: {error.strerror}", hint=space_hint(error)) from None
        return folder / f"{job}.log"

    def keep_tool_log(self, manifest: Manifest) -> None:
        """Move the tool's output beside the manifest of its snapshot."""
        with suppress(FileNotFoundError):
            self.tool_log(manifest.job).rename(self._snapshots / manifest.id / "tool.log")

    # ---- locks

    @contextmanager
    def job_lock(self, job: str) -> Iterator[None]:
        """Hold a job's lock. Raises BusyError if another run has it, StorageError as `require_answer`."""
        from snapmgr.catalog.joblock import held_lock  # noqa: PLC0415 - readers need no lock

        self.require_answer()
        with held_lock(self._locks / f"{job}.lock", job, self._snapshots) as held:
            self._held[job] = held
            try:
                yield
            finally:
                del self._held[job]

    @contextmanager
    def run_lock(self, job: str) -> Iterator[None]:
        """Hold the lock of a job's whole run, which `job_lock` protects only in parts. Raises as `job_lock`.

        Between the backup and the prune, while a verification may take hours, others may delete snapshots or repair.
        """
        from snapmgr.catalog.joblock import held_lock  # noqa: PLC0415 - readers need no lock

        self.require_answer()
        with held_lock(self._locks / f"{job}.run", job, self._snapshots):
            yield

    def swept_pools(self, job: str) -> tuple[Pool, ...] | None:
        """Return the pools of a locked job's snapshots if none is unfinished; None if that takes a look at all."""
        before = self._held[job].before if job in self._held else None
        return before.pools if before is not None else None

    def leave_swept(self, job: str, pools: Iterable[Pool], count: int | None) -> None:
        """Let the next holder of a job's lock know that no snapshot is unfinished, if that is still so at its release.

        `count` is the number of the job's snapshots, None if `swept_pools` was believed.
        """
        if job in self._held:
            self._held[job].swept(pools, count)

    @contextmanager
    def reading(self, snapshot_id: str) -> Iterator[None]:
        """Protect a snapshot from deletion while the context lasts. Raises InUseError if it is being deleted."""
        with self._flock(snapshot_id, fcntl.LOCK_SH, "is being deleted"):
            yield

    @contextmanager
    def deleting(self, snapshot_id: str) -> Iterator[None]:
        """Lock a snapshot exclusively. Raises InUseError if it is being read or has a lease."""
        with self.deleting_many((snapshot_id,)) as refusals:
            for error in refusals.values():
                raise error
            yield

    @contextmanager
    def deleting_many(self, snapshot_ids: Iterable[str]) -> Iterator[dict[str, SnapmgrError]]:
        """Lock snapshots as `deleting` does each; yield, by id, the errors of those that are not locked."""
        refusals: dict[str, SnapmgrError] = {}
        with ExitStack() as stack:
            locks: dict[str, ExitStack] = {}
            for snapshot_id in snapshot_ids:
                lock = stack.enter_context(ExitStack())
                try:
                    lock.enter_context(self._flock(snapshot_id, fcntl.LOCK_EX, "is being read"))
                    locks[snapshot_id] = lock
                except SnapmgrError as error:
                    refusals[snapshot_id] = error
            # Who adds a lease needs a lock that we hold by now.
            for lease in self.leases()[0]:
                if lease.snapshot_id in locks:
                    locks.pop(lease.snapshot_id).close()
                    refusals[lease.snapshot_id] = attached_error(lease)
            yield refusals

    @contextmanager
    def _flock(self, snapshot_id: str, how: int, why: str) -> Iterator[None]:
        self.require_answer()
        try:
            fd = os.open(self._snapshots / snapshot_id, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise NotFoundError(f"there is no snapshot {snapshot_id!r}", hint="see: snapmgr list") from None
        except OSError as error:
            raise CatalogError(f"cannot open {self._snapshots / snapshot_id}: {error.strerror}") from None
        try:
            try:
                fcntl.flock(fd, how | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InUseError(f"snapshot {snapshot_id} {why} by another process") from None
            yield
        finally:
            os.close(fd)


def attached_error(lease: Lease) -> InUseError:
    """Return the error that names the user of a snapshot, and where it is attached."""
    return InUseError(
        f"snapshot {lease.snapshot_id} is attached at {lease.point} ({lease.why} by {lease.user})",
        hint=f"snapmgr umount {lease.point}",
    )


def _order(entry: Entry) -> tuple[int, datetime, str]:
    manifest = entry.manifest
    return (manifest.number, manifest.taken_at or manifest.created_at, manifest.id)
