"""A client that dies during the flush of the engines' logs, where the binary logs are of another instant."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack

import pytest

from support.freezing import frozen_file_system
from support.kinds import kinds
from support.locksite import SLACK_S, lock_site
from support.server import server_user
from support.storage import work_folder

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")

# Sends the statement once the test says so, and does not live to read the answer.
_DIES_AFTER_SENDING = """
import os, signal, time
from pathlib import Path
from pymysql.connections import Connection
_send = Connection._execute_command
_folder = Path(__file__).parent

def _execute(self, command, sql):
    flush = "ENGINE LOGS" in str(sql)
    if flush:
        (_folder / "mark").touch()
        while not (_folder / "go").exists():
            time.sleep(0.005)
    _send(self, command, sql)
    if flush:
        os.kill(os.getpid(), signal.SIGKILL)

Connection._execute_command = _execute
"""


@kinds("mysql-9")
def test_killed_during_the_flush_of_the_engines_logs(kind: str) -> None:
    """It hangs in the server, on a frozen file system: nothing ends it there; with its end the lock is gone."""
    with work_folder() as logs, ExitStack() as stack:
        os.chown(logs, server_user().pw_uid, -1)
        # With 0 there is something left to flush.
        site = stack.enter_context(lock_site(kind, f"--log-bin={logs}/binlog", "--innodb-flush-log-at-trx-commit=0"))
        site.configure(hold_s=5)
        stack.enter_context(site.loaded())
        with site.backup(prologue=[_DIES_AFTER_SENDING]) as run:
            run.wait_for_call()
            with frozen_file_system(str(site.scene.file_system.point)):
                run.release()
                assert run.end()[0] == -signal.SIGKILL
                time.sleep(0.3)
                assert ["ENGINE LOGS" in info for info in site.ours().values()].count(True) == 1
                assert {"GLOBAL", "COMMIT", "BACKUP LOCK"} == {lock.what for lock in site.locks()}
            assert site.write_s() < SLACK_S
            assert site.locks() == []
        site.require_recovery()
