"""Gives the destination of a restore the complete restored tree, or nothing.

The tree is built in a hidden folder *inside* the destination, which only we can enter, and moved up at the end.
Therefore the destination may be an empty mount point (which a rename cannot replace), no server starts on half a
datadir, and the leftovers of an interrupted restore can be distinguished from other files.

::

    DEST/.snapmgr-restore-TOKEN/record.json   the record of the restore (the same as STATE/restores/TOKEN.json)
    DEST/.snapmgr-restore-TOKEN/tree/         the restored tree
    DEST/.snapmgr-restore-TOKEN/root/         an empty folder with the attributes that DEST will have

Once record.json says "finishing", everything is copied, compared and durable: after an interruption the next restore or
doctor moves up the rest. Before that it removes the folder. An flock on DEST keeps other restores out.
"""

from __future__ import annotations

import os
import pwd
import secrets
import stat
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from snapmgr.catalog.manifest import HIDDEN_NAME, RestoreRecord, decode, encode
from snapmgr.contract.errors import BusyError, CatalogError, MissingRequirementError, SnapmgrError, StorageError
from snapmgr.restore.destination_check import LOST_AND_FOUND, require_empty
from snapmgr.system.host import signals_held, this_process
from snapmgr.system.paths import shown
from snapmgr.tree.attributes import Handle, keep
from snapmgr.tree.hiddenfolder import lock, make_folder, make_hidden, move_up, read_record, remove_hidden, write_record
from snapmgr.tree.walk import FOLDER_FLAGS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapmgr.catalog.store import Catalog

_TREE, _ROOT = "tree", "root"
_DEST_MODE = 0o755

Outcome = Literal["active", "finished", "removed"]


class Destination:
    """A destination that this restore has locked; made by `claim_destination`."""

    def __init__(self, catalog: Catalog, record: RestoreRecord, dest_fd: int, hidden_fd: int) -> None:
        self.record = record
        self.dest_fd = dest_fd
        self.hidden_fd = hidden_fd
        """Of the hidden folder."""
        self.tree_fd = make_folder(hidden_fd, _TREE)
        self._catalog = catalog

    def keep_root_attributes(self, source_fd: int) -> None:
        """Keep the attributes of the folder `source_fd`; `finish` gives them to DEST."""
        fd = make_folder(self.hidden_fd, _ROOT)
        try:
            keep(Handle(source_fd), Handle(fd))
            os.fsync(fd)
        finally:
            os.close(fd)

    def finish(self, report: str) -> None:
        """Move the tree up to DEST; after a crash the next restore or doctor does the rest.

        The caller has synced the tree. Raises StorageError if something has appeared in DEST meanwhile: the rest of the
        tree then stays in the hidden folder.
        """
        # From here on an interrupted restore is finished, not removed. These are a few renames: signals can wait.
        with signals_held():
            record = replace(self.record, finishing=True, report=report)
            _write_record(self.hidden_fd, record)
            self.record = record
            _complete(self._catalog, self.record, self.dest_fd, self.hidden_fd)


@contextmanager
def claim_destination(
    catalog: Catalog, dest: str, snapshot_id: str, *, tell: Callable[[str], None] = lambda _line: None
) -> Iterator[Destination]:
    """Lock `dest` (from `choose_destination`) for a restore; leaving the context unfinished removes all that was made.

    First finishes or removes an earlier, unfinished restore. Raises BusyError if another restore to `dest` is active,
    ConfigError if it is not empty, `FinishedMeanwhileError` if an earlier restore only had to be moved up. `tell` takes
    a line for the user.
    """
    record = RestoreRecord(
        token=secrets.token_hex(8),
        snapshot_id=snapshot_id,
        dest=dest,
        made_dest=not os.path.lexists(dest),
        holder=this_process(),
        user=pwd.getpwuid(os.getuid()).pw_name,
        began_at=datetime.now(UTC),
    )
    catalog.write_restoration(record)
    dest_fd = hidden_fd = -1
    try:
        try:
            with signals_held():
                dest_fd = _make_and_lock(record)
            if _resolve_earlier(catalog, record, dest_fd):
                record = replace(record, made_dest=True)
                catalog.write_restoration(record)
            hidden_fd = make_hidden(dest_fd, record.hidden)
        except PermissionError:
            raise MissingRequirementError(
                f"no permission to write to {dest}", hint="run as root, or name a folder that you own"
            ) from None
        except OSError as error:
            raise StorageError(f"cannot restore to {dest}: {error.strerror}") from error
        try:
            record = replace(record, inode=os.fstat(hidden_fd).st_ino)
            _write_record(hidden_fd, record)
            destination = Destination(catalog, record, dest_fd, hidden_fd)
            try:
                yield destination
            finally:
                os.close(destination.tree_fd)
                record = destination.record
        finally:
            os.close(hidden_fd)
    finally:
        try:
            if not record.finishing:
                with signals_held():
                    try:
                        _undo(catalog, record, dest_fd)
                    except (OSError, SnapmgrError) as error:
                        # The error that led here matters more, and the record stays.
                        tell(f"could not clean up {dest}: {error}; clean up later: snapmgr doctor --fix")
        finally:
            if dest_fd >= 0:
                os.close(dest_fd)


class FinishedMeanwhileError(SnapmgrError):
    """An earlier restore to the same folder was complete except for its last step, which is done now."""

    def __init__(self, record: RestoreRecord) -> None:
        super().__init__(
            f"{record.dest} holds {record.snapshot_id}: an interrupted restore was complete except for its last step, "
            "which is done now",
            hint="to restore another snapshot, name another folder",
        )
        self.record = record


def _write_record(hidden_fd: int, record: RestoreRecord) -> None:
    write_record(hidden_fd, encode(record))


def _make_and_lock(record: RestoreRecord) -> int:
    """Create the destination if it does not exist, lock it, and return its descriptor."""
    if record.made_dest:
        with suppress(FileExistsError):
            os.mkdir(record.dest)
            # Independent of the umask: the server's user must be able to enter it.
            os.chmod(record.dest, _DEST_MODE)
    fd = os.open(record.dest, FOLDER_FLAGS)
    try:
        _lock(fd, record.dest)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _lock(fd: int, dest: str) -> None:
    if not lock(fd):
        raise BusyError(f"another restore to {dest} is active", hint="wait until it ends")
    # Another restore may have created DEST and removed it again since then.
    now, ours = os.stat(dest, follow_symlinks=False), os.fstat(fd)
    if (now.st_dev, now.st_ino) != (ours.st_dev, ours.st_ino):
        raise BusyError(f"{dest} was replaced during the restore", hint="try again")


def _resolve_earlier(catalog: Catalog, record: RestoreRecord, dest_fd: int) -> bool:
    """Finish or remove earlier, unfinished restores; return whether one of them had created DEST, which stays.

    We hold the lock on DEST: none of them is active.
    """
    earlier = [found for name in os.listdir(dest_fd) if (found := _recognise(catalog, dest_fd, name)) is not None]
    # Restores that were interrupted before they created anything in DEST, or after all of it was removed.
    tokens = {record.token, *(found.token for found in earlier)}
    earlier += [known for known in catalog.restorations()[0] if known.dest == record.dest and known.token not in tokens]
    for found in earlier:
        # Its file system may have been mounted elsewhere at that time.
        here = replace(found, dest=record.dest, made_dest=False)
        if _finish_or_remove(catalog, here, dest_fd) == "finished":
            raise FinishedMeanwhileError(here)
    require_empty(dest_fd, record.dest)
    return any(found.made_dest for found in earlier)


def _recognise(catalog: Catalog, dest_fd: int, name: str) -> RestoreRecord | None:
    match = HIDDEN_NAME.fullmatch(name)
    if match is None:
        return None
    try:
        fd = os.open(name, FOLDER_FLAGS, dir_fd=dest_fd)
    except OSError:
        return None
    try:
        return _known(catalog, fd, match["token"])
    finally:
        os.close(fd)


def _known(catalog: Catalog, hidden_fd: int, token: str) -> RestoreRecord | None:
    """Given an open folder with the name of a hidden one, return the record of its restore; None if it is not ours."""
    inode, data = os.fstat(hidden_fd).st_ino, read_record(hidden_fd)
    if data is None:
        return None
    if not data:
        known = next((one for one in catalog.restorations()[0] if one.token == token), None)
        return replace(known, inode=inode) if known is not None else None
    try:
        record = decode(data, RestoreRecord, "record.json")
    except CatalogError:
        return None
    return record if (record.token, record.inode) == (token, inode) else None


def _finish_or_remove(catalog: Catalog, record: RestoreRecord, dest_fd: int) -> Outcome:
    """Finish or remove an earlier restore; we hold the lock on DEST."""
    with suppress(FileNotFoundError):
        hidden_fd = os.open(record.hidden, FOLDER_FLAGS, dir_fd=dest_fd)
        try:
            # The folder's own record is the newer one.
            known = _known(catalog, hidden_fd, record.token)
            if known is None:
                raise StorageError(
                    f"{record.dest}/{record.hidden} was not made by a restore: it is not changed",
                    hint="check it, and remove it manually",
                )
            record = replace(known, dest=record.dest, made_dest=record.made_dest)
            if record.finishing:
                _complete(catalog, record, dest_fd, hidden_fd)
                return "finished"
        finally:
            os.close(hidden_fd)
    _remove(record, dest_fd)
    catalog.drop_restoration(record)
    return "removed"


def _complete(catalog: Catalog, record: RestoreRecord, dest_fd: int, hidden_fd: int) -> None:
    """Move up the rest of the tree, set the attributes of DEST, remove the hidden folder; idempotent."""
    with suppress(FileNotFoundError):
        tree_fd = os.open(_TREE, FOLDER_FLAGS, dir_fd=hidden_fd)
        try:
            os.fchmod(tree_fd, 0o700)
            for name in sorted(os.listdir(tree_fd)):
                _move(tree_fd, name, dest_fd, record)
            os.fsync(tree_fd)
        finally:
            os.close(tree_fd)
    os.fsync(dest_fd)
    root: os.stat_result | None = None
    with suppress(FileNotFoundError):
        root_fd = os.open(_ROOT, FOLDER_FLAGS, dir_fd=hidden_fd)
        try:
            keep(Handle(root_fd), Handle(dest_fd))
            root = os.fstat(root_fd)
        finally:
            os.close(root_fd)
        if os.geteuid() != 0:
            # Everybody but root needs these rights to remove the hidden folder.
            os.fchmod(dest_fd, stat.S_IMODE(root.st_mode) | stat.S_IRWXU)
    remove_hidden(dest_fd, record.hidden)
    if root is not None:
        os.fchmod(dest_fd, stat.S_IMODE(root.st_mode))
        os.utime(dest_fd, ns=(root.st_atime_ns, root.st_mtime_ns))
    os.fsync(dest_fd)
    catalog.drop_restoration(record)


def _move(tree_fd: int, name: str, dest_fd: int, record: RestoreRecord) -> None:
    try:
        move_up(tree_fd, name, dest_fd)
    except FileExistsError:
        if name == LOST_AND_FOUND:
            # A new ext4 has its own.
            with suppress(OSError):
                os.rmdir(name, dir_fd=tree_fd)
                return
        raise StorageError(
            f"{record.dest}/{shown(name)} appeared during the restore: it is not changed, and the rest of the "
            f"restored tree is in {record.dest}/{record.hidden}/{_TREE}",
            hint=f"move it away, then: snapmgr restore {record.snapshot_id} {record.dest}",
        ) from None


def _undo(catalog: Catalog, record: RestoreRecord, dest_fd: int) -> None:
    if dest_fd >= 0:
        _remove(record, dest_fd)
    catalog.drop_restoration(record)


def _remove(record: RestoreRecord, dest_fd: int) -> None:
    """Remove the hidden folder, and DEST if it was created for the restore and is empty."""
    # Durably, before its record goes: otherwise a power failure would bring the folder back without a known owner.
    remove_hidden(dest_fd, record.hidden)
    if record.made_dest:
        with suppress(OSError):
            os.rmdir(record.dest)


def resolve_record(catalog: Catalog, record: RestoreRecord) -> Outcome:
    """Finish or remove an unfinished restore, and nothing else in its destination. Idempotent.

    Returns "active" if it is still running. Raises StorageError if it cannot be finished or removed.
    """
    try:
        dest_fd = os.open(record.dest, FOLDER_FLAGS)
    except (FileNotFoundError, NotADirectoryError):
        catalog.drop_restoration(record)
        return "removed"
    except OSError as error:
        raise StorageError(f"cannot open {record.dest}: {error.strerror}") from None
    try:
        if not lock(dest_fd):
            return "active"
        with signals_held():
            return _finish_or_remove(catalog, record, dest_fd)
    finally:
        os.close(dest_fd)
