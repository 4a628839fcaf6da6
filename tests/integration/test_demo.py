"""The demonstration does what it shows, and leaves nothing behind however it ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from itertools import product

import pytest

from support.storage import leftovers
from support.thoroughness import CAMPAIGN

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "mariadbd")


def _start(pytestconfig):
    return subprocess.Popen(
        [sys.executable, pytestconfig.rootpath / "tests" / "demo.py"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_demonstration_from_end_to_end(pytestconfig):
    with _start(pytestconfig) as process:
        said = process.communicate(timeout=100)[0]
    assert process.returncode == 0, said
    held_ms = [float(number) for number in re.findall(r"lock: waited .*, held ([\d.]+) ms \(storage call", said)]
    assert len(held_ms) == 2, said
    assert said.count("proved restorable; the proof took ") == 2
    assert said.count("the clone is writable, the snapshot never changes") == 1
    assert re.search(r"deleted +demo\.\S+ +no rule keeps it", said), said
    # A server has started on the restored folder, and the lost state directory is as it was.
    assert re.search(r"COUNT\(\*\) FROM load_test.ledger'\n  [1-9]", said), said
    listed = re.findall(r"\$ snapmgr list\n((?:  .*\n)*?)  \[", said)
    assert len(listed) == 4
    assert "no snapshots in" in listed[2]
    assert listed[3] == listed[1]
    assert "Nothing is left behind" in said
    assert leftovers(process.pid) == []


MOMENTS = (
    *("MariaDB ", "$ snapmgr backup", "arming", "$ snapmgr mount"),
    *("$ ls ", "starting mariadb", "$ mariadbd", "repairing"),
)
SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize(
    ("moment", "number"),
    list(product(MOMENTS, SIGNALS) if CAMPAIGN else zip(MOMENTS, SIGNALS * 4, strict=True)),
)
def test_demonstration_interrupted(pytestconfig, moment, number):
    with _start(pytestconfig) as process:
        said = []
        for line in process.stdout:
            said.append(line)
            if moment in line and number is not None:
                process.send_signal(number)
                number = None
        process.wait(60)
    assert number is None, f"the demonstration never came to {moment!r}: {''.join(said)}"
    assert process.returncode == 130, "".join(said)
    assert "Traceback" not in "".join(said)
    assert "LEFT BEHIND" not in "".join(said)
    assert leftovers(process.pid) == []


def test_demonstration_whose_reader_goes_away(pytestconfig):
    script = pytestconfig.rootpath / "tests" / "demo.py"
    line = f'set -o pipefail; "{sys.executable}" "{script}" | head -n 2'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 2
