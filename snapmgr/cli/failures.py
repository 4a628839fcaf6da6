"""Turns unexpected exceptions into errors with an exit code."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from snapmgr import __version__
from snapmgr.contract.errors import CatalogError, MissingRequirementError, SnapmgrError
from snapmgr.system.paths import lies_in

if TYPE_CHECKING:
    from snapmgr.cli.session import Session

# A full or failing disk, or a resource limit, can fail any call: these are not bugs.
_SYSTEM_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
)


def _in_state_dir(session: Session, error: OSError) -> bool:
    """Whether a call failed on a path of the state directory, which somebody else has changed, then."""
    with suppress(SnapmgrError):
        names = [name for name in (error.filename, error.filename2) if isinstance(name, (str, os.PathLike))]
        return any(lies_in(os.path.abspath(name), os.path.abspath(session.config().state_dir)) for name in names)
    return False


def foreseen(session: Session, error: Exception) -> SnapmgrError:
    """Return the error to report for any exception.

    The traceback of a bug is printed here: lines of code, never the values of variables, which may hold a secret.
    """
    if isinstance(error, SnapmgrError):
        trace = session.debug
        shown = error
    elif isinstance(error, OSError) and _in_state_dir(session, error):
        trace = session.debug
        kind = MissingRequirementError if isinstance(error, PermissionError) else CatalogError
        shown = kind(
            f"the state directory cannot be used: {error.filename}: {error.strerror}",
            hint="run as root" if isinstance(error, PermissionError) else "inspect this path; see: snapmgr doctor",
        )
    elif isinstance(error, OSError) and error.errno in _SYSTEM_ERRORS:
        trace = session.debug
        shown = SnapmgrError(f"the system refused: {error}")
    else:
        trace = True
        shown = SnapmgrError(
            f"this is a bug in snapmgr {__version__}: {type(error).__name__}: {error}",
            hint="please report it with the lines above",
        )
    if trace:
        import traceback

        session.console.close()
        sys.stderr.write("".join(traceback.format_exception(error)))
    return shown
