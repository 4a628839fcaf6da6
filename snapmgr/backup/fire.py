"""Takes the snapshot of a source without a server: a directory, watched if its copy is not atomic, or a tool backup."""

from __future__ import annotations

import os
import stat
import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from snapmgr.catalog.manifest import Position, QuiesceRecord, SourcePosition
from snapmgr.contract.errors import NotQuiescedError, StorageError
from snapmgr.contract.records import FireError

if TYPE_CHECKING:
    import hashlib
    from collections.abc import Callable, Iterator

    from snapmgr.backup.trigger import Trigger
    from snapmgr.contract.records import Shot
    from snapmgr.source.located import SnapshotSource

UNLOCKED_FIRE_S = 3600.0
"""Without a lock there is no time limit; this bounds a storage call that hangs."""


class Evidence(Struct, frozen=True, kw_only=True):
    """The results of the section in which the source was held still."""

    shots: tuple[Shot, ...]
    quiesce: QuiesceRecord
    position: Position | None
    sources: tuple[SourcePosition, ...] = ()


def fire(source: SnapshotSource, trigger: Trigger, sync: Callable[[], None]) -> Evidence:
    """Let the helper take the snapshot, and prove that nothing changed meanwhile if the storage cannot promise it.

    `sync` flushes dirty data. Raises NotQuiescedError if something changed, MissingRequirementError, and the storage's
    errors.
    """
    atomic = source.backend.capabilities(source.volumes).atomicity == "volume"
    if not atomic:
        # A storage with atomic snapshots was flushed when it was armed, and takes the rest along: no lock is waiting.
        sync()
    if source.tool_backup is not None:
        trigger.fire(time.monotonic() + UNLOCKED_FIRE_S)
        source.tool_backup.require_unchanged()
        proof = "no file changed from the seal to after the snapshot"
        evidence = _serverless_evidence(trigger, "a finished backup, sealed", proof)
        return replace(evidence, position=source.tool_backup.position, sources=source.tool_backup.sources)
    unchanged: AbstractContextManager[None] = nullcontext() if atomic else _unchanged(source.path)
    with unchanged:
        trigger.fire(time.monotonic() + UNLOCKED_FIRE_S)
    proof = "the storage takes the volume in one instant" if atomic else "no file had changed after the copy"
    return _serverless_evidence(trigger, "a plain directory", proof)


def _serverless_evidence(trigger: Trigger, why: str, proof: str) -> Evidence:
    return Evidence(
        shots=trigger.shots(),
        quiesce=QuiesceRecord(level="none", why=why, proof=proof, attempts=1, waited_s=0.0, held_s=0.0),
        position=None,
    )


@contextmanager
def _unchanged(path: str) -> Iterator[None]:
    before = fingerprint(path)
    failure: FireError | None = None
    try:
        yield
    except FireError as error:
        failure = error  # often only because a file vanished while it was copied
    if fingerprint(path) != before:
        raise NotQuiescedError(
            f"{path} changed while it was copied file by file" + (f": {failure.message}" if failure else ""),
            hint="stop the programs that write there, or move it to storage with atomic snapshots of a volume (btrfs)",
        )
    if failure is not None:
        raise failure


def fingerprint(path: str) -> str:
    """Return a digest over all names, types, sizes, inodes, owners, modes and times (ns) below `path`.

    It proves that nothing changed while storage copied file by file, and is cheap enough to be taken right before and
    right after the copy. It misses a write through an mmap that the kernel has not noticed yet: call `syncfs` before
    the first one.
    """
    import hashlib  # noqa: PLC0415 - atomic storage needs no digest

    digest = hashlib.blake2b(digest_size=16)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            _add_folder(digest, fd, os.fstat(fd).st_dev)
        finally:
            os.close(fd)
    except (FileNotFoundError, NotADirectoryError):
        raise NotQuiescedError(f"files below {path} were created or deleted while it was being read") from None
    except OSError as error:
        raise StorageError(f"cannot read the tree at {path}: {error.strerror}") from None
    return digest.hexdigest()


def _add_folder(digest: hashlib.blake2b, fd: int, device: int) -> None:
    """Add a folder by its descriptor: a path may be longer than the kernel accepts. Skips other mounts."""
    import marshal  # noqa: PLC0415 - the same

    from snapmgr.tree.facts import facts_of  # noqa: PLC0415 - the same

    seen: list[tuple[object, ...]] = []
    for name in sorted(os.listdir(fd)):
        status = os.stat(name, dir_fd=fd, follow_symlinks=False)
        seen.append((name, status.st_dev, *facts_of(status)))
        if stat.S_ISDIR(status.st_mode) and status.st_dev == device:
            child = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            try:
                _add_folder(digest, child, device)
            finally:
                os.close(child)
    # Version 2 has no references, which depend on the interpreter's memory: equal tuples are equal bytes.
    digest.update(marshal.dumps(seen, 2))
