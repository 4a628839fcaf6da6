"""What a backup loads while its server is locked or frozen: nothing, as its program may be on a slow or frozen disk."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from support.faults import Faults

if TYPE_CHECKING:
    from support.scene import Scene

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "mariadbd")
# It writes each import down from the request for the lock until its end; in the helper, from the storage call on.
PROGRAM = """if True:
    import sys
    from snapmgr.backup import trigger
    from snapmgr.mysql.lock import heldlock, quiesce
    from snapmgr.cli.main import main
    told, held = sys.argv.pop(), False
    def tell(text):
        with open(told, "a") as file:
            file.write(text + "\\n")
    def hook(event, arguments):
        if held and event == "import":
            tell(arguments[0])
    def wrapped(kind, name, after):
        whole = getattr(kind, name)
        def run(*arguments):
            global held
            if after:
                tell(name)
                held = True
            try:
                return whole(*arguments)
            finally:
                held = held and after
        setattr(kind, name, run)
    wrapped(quiesce._Request, "_lock", True)
    wrapped(heldlock.HeldLock, "release", False)
    wrapped(heldlock.HeldLock, "end", False)
    wrapped(trigger, "_fire", True)
    sys.addaudithook(hook)
    sys.exit(main())
"""


def _run(scene: Scene, faults: Faults) -> subprocess.CompletedProcess[str]:
    told = scene.folder / "told"
    told.unlink(missing_ok=True)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | faults.environment()
    argv = [sys.executable, "-c", PROGRAM, "--config", str(scene.config_file), "backup", "demo", str(told)]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert told.read_text().split() == ["_lock", "_fire"], done.stderr
    return done


def test_nothing_is_loaded_while_a_server_is_frozen(scene: Scene) -> None:
    scene.configure('quiesce = "freeze-process"')
    done = _run(scene, Faults())
    assert done.returncode == 0, done.stderr


def test_nothing_is_loaded_when_the_storage_hangs(scene: Scene) -> None:
    scene.configure('quiesce = "backup-lock"\nlock_hold = "300ms"')
    done = _run(scene, Faults(delay_s=1.0))
    assert done.returncode == 1, done.stderr
    assert "had not returned at the deadline" in done.stderr
