"""Turns unexpected exceptions into errors with an exit code."""

from __future__ import annotations

import errno
import sys
import traceback
from typing import TYPE_CHECKING

from snapmgr import __version__
from snapmgr.contract.errors import SnapmgrError

if TYPE_CHECKING:
    from snapmgr.cli.session import Session

# A full or failing disk, or a resource limit, can fail any call: these are not bugs.
_SYSTEM_ERRORS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
)


def foreseen(session: Session, error: Exception) -> SnapmgrError:
    """Return the error to report for any exception.

    The traceback of a bug is printed here: lines of code, never the values of variables, which may hold a secret.
    """
    if isinstance(error, SnapmgrError):
        trace = session.debug
        shown = error
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
        session.console.close()
        sys.stderr.write("".join(traceback.format_exception(error)))
    return shown
