"""Where a benchmark of LVM runs: here if there is device-mapper and a scratch disk, else in a User Mode Linux guest."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from snapmgr_lvm import dm

_ROOT = Path(__file__).parents[2]
_TIME_LIMIT_S = 7200


def enter_guest(script: str, folder: Path | None) -> None:
    """Return if this is a place to run; else run `script` with our arguments in a guest instead, and do not return.

    On a machine with device-mapper SNAPMGR_TEST_DEV must name a disk that may be wiped: a blank one.

    Args:
        script: the benchmark's file.
        folder: where it writes results, if it does; the guest sees nothing else of ours but the checkout.
    """
    if dm.has_device_mapper():
        # Refuses a disk that is somebody's, and says why.
        refused = subprocess.run([_ROOT / "vagrant/guest-test", "--version"], check=False, stdout=subprocess.DEVNULL)
        if refused.returncode:
            sys.exit(refused.returncode)
        return
    keep = ["--keep", str(folder)] if folder is not None else []
    command = ["env", f"PYTHONPATH={_ROOT}/tests", sys.executable, script, *sys.argv[1:]]
    limit = ["--time-limit", str(_TIME_LIMIT_S), "--name", "benchmark"]
    os.execv(_ROOT / "vagrant/uml.py", ["uml.py", *keep, *limit, "--", *command])  # noqa: S606 - nothing of it is a stranger's
