"""What nobody foresaw, as an error with an exit code."""

from __future__ import annotations

import errno
import sys
import traceback
from typing import TYPE_CHECKING

from snapmgr import __version__
from snapmgr.contract.errors import SnapmgrError

if TYPE_CHECKING:
    from snapmgr.cli.session import Session

# A full or dying disk, or a limit, may show at any line: no bug.
_OF_THE_SYSTEM = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE}
)


def foreseen(session: Session, error: Exception) -> SnapmgrError:
    """Given any exception, return what to say of it.

    A bug's traceback is printed here: lines of code, never the values of variables, which may hold a secret.
    """
    if isinstance(error, SnapmgrError):
        trace = session.debug
        told = error
    elif isinstance(error, OSError) and error.errno in _OF_THE_SYSTEM:
        trace = session.debug
        told = SnapmgrError(f"the system refused: {error}")
    else:
        trace = True
        told = SnapmgrError(
            f"this is a bug in snapmgr {__version__}: {type(error).__name__}: {error}",
            hint="please report it with the lines above",
        )
    if trace:
        session.console.close()
        sys.stderr.write("".join(traceback.format_exception(error)))
    return told
