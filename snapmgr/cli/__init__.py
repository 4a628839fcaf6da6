"""The command line: one module for each command, imported when it is called; the only room that prints.

Nothing imports it but `snapmgr.__main__` and the console script.
"""

import atexit
import gc
import os
import sys
from contextlib import suppress

# A start makes tens of thousands of objects, none of which is garbage: with Python's threshold of 700, looking for some
# takes a twentieth of a short command's time. Its last look, at the exit, takes another twelfth.
gc.set_threshold(100_000)

_exit_codes: list[int] = []


def leave_with(exit_code: int) -> None:
    """Let the process end with this code when it exits, without freeing each object: that takes 2 to 3 ms."""
    _exit_codes[:] = [exit_code]


@atexit.register
def _leave() -> None:
    # Registered before any other one, so it is called last: then threads have ended, and nothing is left to clean up.
    gc.freeze()
    if _exit_codes:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(_exit_codes[0])
