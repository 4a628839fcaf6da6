"""The whole crash campaign, on two cores: `./run crash [COMMAND…]`, as in `./run crash restore mount`.

Every point is tried, or every Nth with SNAPMGR_CRASH_EVERY=N. Each of the two test runs has a mount table of its own:
what one of them mounts must not be kept by a server of the other.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec

from support.campaign import HEADS, Tally, row, total

_HERE = Path(__file__).parent
_HALVES = ("on_btrfs", "on_xfs")
_NOTHING = 5


def main(commands: list[str]) -> int:
    """Run both halves, print each command's count as it comes, then the sum, then what failed."""
    start = time.monotonic()
    read_end, write_end = os.pipe()
    environment = {"SNAPMGR_CAMPAIGN": "1", "SNAPMGR_CRASH_EVERY": "1"} | os.environ
    environment["SNAPMGR_CRASH_COUNT"] = str(write_end)
    private = ["unshare", "--mount", "--propagation", "private"] if os.geteuid() == 0 else []
    tallies: list[Tally] = []
    with ExitStack() as stack:
        runs = []
        for half in _HALVES:
            log = stack.enter_context(tempfile.TemporaryFile())
            which = f"{half} and ({' or '.join(commands)})" if commands else half
            argv = [*private, sys.executable, "-m", "pytest", str(_HERE / "crash"), "-k", which]
            process = subprocess.Popen(
                argv, stdout=log, stderr=subprocess.STDOUT, env=environment, pass_fds=(write_end,), cwd=_HERE.parent
            )
            runs.append((stack.enter_context(process), log))
        os.close(write_end)
        _say(HEADS)
        with open(read_end, "rb") as counts:
            for line in counts:
                tallies.append(msgspec.json.decode(line, type=Tally))
                _say(row(tallies[-1]))
        codes = [process.wait() for process, _ in runs]
        for (_, log), code in zip(runs, codes, strict=True):
            if code not in (0, _NOTHING):
                log.seek(0)
                _say(log.read().decode(errors="replace"))
    _say(row(total(tallies)))
    every = environment["SNAPMGR_CRASH_EVERY"]
    what = "every point was tried" if every == "1" else f"one point in {every} was tried"
    _say(f"{what}, in {(time.monotonic() - start) / 60:.0f} minutes")
    # 5: nothing there that was asked for, which is an error only if it is so in both halves.
    return max(code for code in codes if code != _NOTHING or set(codes) == {_NOTHING})


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
