"""Frozen file systems that are thawed again whatever happens to the test: what hangs on one cannot be killed."""

from __future__ import annotations

import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def frozen_file_system(point: str, *, at_most_s: float = 60.0) -> Iterator[None]:
    """Freeze the file system mounted at `point` (fsfreeze(8)) while the context lasts, and `at_most_s`.

    The guard is a process of its own: the test itself may come to hang there.
    """
    guard = subprocess.Popen(
        ["/bin/sh", "-c", f"sleep {at_most_s}; fsfreeze --unfreeze '{point}'"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        subprocess.run(["fsfreeze", "--freeze", point], check=True, timeout=30)
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", point], check=False, stderr=subprocess.DEVNULL)
        guard.kill()
        guard.wait()
