"""Sets up the environment of a server on a copy: user, mounts, and a folder for socket, log and temporary files."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from typing import TYPE_CHECKING

from snapmgr.contract.errors import MissingRequirementError, StorageError, VerificationError
from snapmgr.system.command import CommandRunner

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import BinaryIO

_LOG = "server.log"
"""Name of the file with the server's output, in its folder."""
COVER_FAILED = 97
"""Exit code if the mounts of `covered` failed."""
# Unmounts the file systems before the first "--", then mounts the pairs of folders before the second.
_COVER = (
    'while [ "$1" != -- ]; do umount --lazy "$1" || :; shift; done; shift; '
    f'while [ "$1" != -- ]; do mount --bind "$1" "$2" || exit {COVER_FAILED}; shift 2; done; shift; exec "$@"'
)
# sun_path has 108 bytes; clients cut or refuse at different lengths before that.
_SOCKET_LIMIT = 100


def owner_of(datadir: str) -> tuple[int, int]:
    """Return the user and group to run a server on a copied datadir: the datadir's owner.

    Raises VerificationError if root owns the folder and another user files in it, MissingRequirementError without the
    right.
    """
    facts = os.stat(datadir)
    if facts.st_uid == 0:
        others = {entry.stat(follow_symlinks=False).st_uid for entry in os.scandir(datadir)} - {0}
        if others:
            raise VerificationError(
                f"the datadir {datadir} belongs to root, but files in it to user {min(others)}: no server can use it"
            )
    if os.geteuid() not in (0, facts.st_uid):
        raise MissingRequirementError(
            f"the datadir {datadir} belongs to user {facts.st_uid}, and only root can start a server as that user",
            hint="run snapmgr as root",
        )
    return facts.st_uid, facts.st_gid


def as_user(uid: int, gid: int) -> list[str]:
    """Return the command prefix that runs a program as this user; empty without root."""
    if os.geteuid() != 0:
        return []
    return ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--"]


def covered(covers: Sequence[tuple[str, str]], out: Iterable[str] = ()) -> list[str]:
    """Return the command prefix that lets a program see folders of a copy at other paths; empty without `covers`.

    The program runs in its own mount namespace. Works only as root.

    Args:
        covers: pairs of a folder and the path to mount it over, as `snapmgr.mysql.datadir.copy.Copy.covers`.
        out: mount points to unmount in the namespace first, in this order.
    """
    if not covers:
        return []
    pairs = [path for pair in covers for path in pair]
    return ["unshare", "--mount", "--propagation", "private", "--", "sh", "-c", _COVER, "sh", *out, "--", *pairs, "--"]


def make_run_dir(run_dir: str, uid: int, gid: int, *, mode: int = 0o700) -> tuple[str, BinaryIO]:
    """Make the folder for the socket and temporary files, and the log in it; return the socket's path and the log.

    The folder itself changes its owner last, with `mode`: from then on its owner may put symlinks there.
    """
    socket = os.path.join(run_dir, "s")
    if len(os.fsencode(socket)) >= _SOCKET_LIMIT:
        raise MissingRequirementError(f"{socket} is too long for a socket", hint="choose a shorter runtime folder")
    os.makedirs(run_dir, mode=0o700, exist_ok=True)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(run_dir, flags)
    try:
        with suppress(FileExistsError):
            os.mkdir("tmp", 0o700, dir_fd=fd)
        inner = os.open("tmp", flags, dir_fd=fd)
        try:
            _give(inner, uid, gid, 0o700)
        finally:
            os.close(inner)
        # Always a new file: the owner of an old one may have linked it to any file.
        with suppress(FileNotFoundError):
            os.unlink(_LOG, dir_fd=fd)
        log = os.open(_LOG, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=fd)
        _give(fd, uid, gid, mode)
    finally:
        os.close(fd)
    return socket, os.fdopen(log, "r+b", buffering=0)


def _give(fd: int, uid: int, gid: int, mode: int) -> None:
    os.fchmod(fd, mode)
    if os.geteuid() == 0:
        os.fchown(fd, uid, gid)


def check_reachable(datadir: str, run_dir: str, uid: int, gid: int) -> None:
    """Raise MissingRequirementError if the owner cannot traverse the folders above: the server would report damage."""
    for path in (os.path.dirname(datadir), run_dir):
        if CommandRunner().run([*as_user(uid, gid), "test", "-x", path], ok=(0, 1)).returncode != 0:
            raise MissingRequirementError(
                f"user {uid}, who owns the datadir, cannot reach {path}",
                hint="the user must be able to traverse the folders above it (chmod o+x)",
            )


def remove_folder(folder: str) -> None:
    """Remove a server's folder with its content; does nothing if it is gone. Raises StorageError."""
    # rmtree works by descriptors: the server's user owns the folder and may put symlinks there.
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageError(
            f"cannot remove {folder}: {error}", hint="find out which process uses it, and remove it"
        ) from None
