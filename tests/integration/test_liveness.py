"""Whatever happens to us, to the server or to the storage while a loaded server is locked: the lock is soon gone.

And nothing is READY without its proof, nothing is left in the storage or in the server, the exit code and the words say
why, and the next backup succeeds. By the whole command line, with the least privileges. What was measured is logged.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

import pymysql
import pytest

from snapmgr.catalog.manifest import QuiesceRecord
from snapmgr.mysql.connect.abilities import probe_abilities
from snapmgr.mysql.connect.client import Connection, Credentials, connect
from snapmgr.mysql.connect.identity import identify
from snapmgr.mysql.lock.levels import LockNeeds, choose
from snapmgr.mysql.lock.quiesce import LockBounds, locked
from support.freezing import frozen_file_system
from support.kinds import each_kind, kinds
from support.locksite import (
    ACCOUNT,
    DEAF_TO_TIME,
    HOLD_S,
    LONG_FIRST_TRY,
    REST_UNTIL_RELEASED,
    SELECT,
    SLACK_S,
    SLOW_JITTER,
    UNSEEN,
    UPDATE,
    WAIT_S,
    LockSite,
    lock_site,
)
from support.processes import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapmgr.mysql.lock.heldlock import HeldLock

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")

_LOG = logging.getLogger(__name__)
# The server itself ends a lock whose owner does not run: whole seconds, one more than the bound.
SERVER_HOLD_S = HOLD_S + 1
NEW = "mariadb-11.8", "mysql-9"
"""What runs for these runs for the system's MariaDB in test_hung_storage.py."""


@pytest.fixture(scope="module")
def sites() -> Iterator[Callable[[str], LockSite]]:
    with ExitStack() as stack:
        made: dict[str, LockSite] = {}

        def get(kind: str) -> LockSite:
            if kind not in made:
                made[kind] = stack.enter_context(lock_site(kind))
            return made[kind]

        yield get


@pytest.fixture
def site(sites: Callable[[str], LockSite], kind: str) -> Iterator[LockSite]:
    """The server of this kind, under load, with a job of one short try."""
    site = sites(kind)
    site.configure()
    with site.loaded():
        yield site


def told(what: str, seconds: float) -> float:
    _LOG.info("%s: %.3f s", what, seconds)
    return seconds


# ---- while it is held


@kinds(*NEW)
def test_a_connection_killed_under_the_lock(site: LockSite) -> None:
    site.configure(hold_s=20)
    with site.backup(delay_s=3.0) as run:
        run.wait_for_call()
        site.server.query(f"KILL CONNECTION {site.lock_connection()}")
        assert told("write after KILL", site.write_s()) < 2.5
        site.require_failure(run, (4,), "the lock was lost during the snapshot")


@kinds(*NEW)
def test_all_of_ours_stopped_under_the_lock(site: LockSite) -> None:
    """Nothing of ours acts any more; the server does (wait_timeout)."""
    with site.backup(delay_s=0.3) as run:
        run.wait_for_call()
        with run.stopped():
            waited_s = told("write after SIGSTOP", site.write_s())
            assert 0.3 < waited_s < SERVER_HOLD_S + SLACK_S
            assert site.ddl_s() < SLACK_S
        site.require_failure(run, (1, 4), "lost", "deadline", "time was over")


@kinds("mysql-9")
def test_a_server_killed_and_started_again_under_the_lock(site: LockSite) -> None:
    """Another connection would have to be made to ask it: none is."""
    site.configure(hold_s=20)
    with site.backup(delay_s=1.5) as run:
        run.wait_for_call()
        site.server.kill()
        site.server.start()
        assert told("write after the server's start", site.write_s()) < SLACK_S
        code, said = run.end()
        assert code == 4, said
        assert "the lock was lost during the snapshot" in said
    # The old writers ended with the server.
    site.load.stop()
    with site.loaded():
        site.require_recovery()


@kinds("mysql-9")
def test_a_call_that_takes_longer_than_the_lock_may_be_held(site: LockSite) -> None:
    with site.backup(delay_s=HOLD_S + SLACK_S + 1) as run:
        run.wait_for_call()
        assert told("write during the call", site.write_s()) < HOLD_S + SLACK_S
        site.require_failure(run, (1,), "deadline")


@kinds("mysql-9")
def test_a_file_system_frozen_under_the_lock(site: LockSite) -> None:
    """The call hangs where no signal reaches it. So do commits; but not for our lock."""
    with site.backup(delay_s=0.3) as run:
        run.wait_for_call()
        start = time.monotonic()
        with frozen_file_system(str(site.scene.file_system.point)):
            wait_until(lambda: not site.locks(), HOLD_S + SLACK_S)
            told("no lock after the freeze", time.monotonic() - start)
        site.require_failure(run, (1,), "deadline")


@kinds("mysql-9")
@pytest.mark.parametrize("which", ["parent", "helper"])
def test_one_of_ours_killed_under_the_lock(site: LockSite, which: str) -> None:
    site.configure(hold_s=20)
    with site.backup(delay_s=4.0) as run:
        run.wait_for_call()
        parent, helper = run.processes()
        os.kill(parent if which == "parent" else helper, signal.SIGKILL)
        assert told(f"write after the {which}'s end", site.write_s()) < 3.5
        if which == "helper":
            site.require_failure(run, (1,), "died in its storage call")
            return
        assert run.end()[0] == -signal.SIGKILL
        site.require_recovery()


@kinds("mysql-9")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_frozen_process_of_which_only_the_thawer_is_left(site: LockSite, how: signal.Signals) -> None:
    site.configure('quiesce = "freeze-process"')
    with site.backup(delay_s=HOLD_S + 0.2) as run:
        run.wait_for_call()
        with ExitStack() as stack:
            if how == signal.SIGSTOP:
                stack.enter_context(run.stopped())
            else:
                for pid in run.processes():
                    os.kill(pid, signal.SIGKILL)
            start = time.monotonic()
            site.server.query("SELECT 1")
            thawed_s = told("thawed", time.monotonic() - start)
            site.write_s()
            written_s = told("write", time.monotonic() - start)
        code, said = run.end()
    if how == signal.SIGKILL:
        assert written_s < SLACK_S
    else:
        assert 0.3 < thawed_s < HOLD_S + SLACK_S
        # A server that stood still counts from its thaw.
        assert written_s < HOLD_S + SERVER_HOLD_S + SLACK_S
        assert code in (1, 4), said
    site.require_recovery()


@kinds("mysql-9")
def test_each_statement_under_the_lock_leaves_less_time_to_a_stopped_process(site: LockSite) -> None:
    """The server counts wait_timeout from the last one: with the first value it would hold up to twice the bound."""
    with held(site, hold_s=2) as (lock, connection):
        assert idle_s(site, connection) == 3
        time.sleep(1.1)
        lock.prove()
        assert idle_s(site, connection) == 2
        lock.release()
    with held(site, hold_s=9) as (lock, connection):
        assert idle_s(site, connection) == 10
        lock.expect_freeze()
        assert idle_s(site, connection) == 3


@contextmanager
def held(site: LockSite, hold_s: float) -> Iterator[tuple[HeldLock, Connection]]:
    credentials = Credentials(socket=str(site.server.socket), user=ACCOUNT)
    with connect(credentials) as connection:
        abilities = probe_abilities(connection, identify(connection))
    bounds = LockBounds(max_stall_s=5, lock_attempts=1, lock_hold_s=hold_s)
    choice = choose("auto", abilities, LockNeeds())
    with locked(credentials, abilities, choice, bounds, check=lambda _: None, sync=lambda: None) as lock:
        yield lock, lock._connection


def idle_s(site: LockSite, connection: Connection) -> int:
    """The session's wait_timeout, as somebody else sees it."""
    ((value,),) = site.server.query(
        "SELECT VARIABLE_VALUE FROM performance_schema.variables_by_thread JOIN performance_schema.threads "
        "USING (THREAD_ID) WHERE PROCESSLIST_ID = %s AND VARIABLE_NAME = 'wait_timeout'",
        connection.connection_id,
    )
    return int(value)


# ---- while it is waited for


@each_kind
def test_a_connection_killed_while_it_waits(site: LockSite) -> None:
    site.configure(wait_s=20)
    with site.blocker(UPDATE), site.backup(prologue=[UNSEEN]) as run:
        site.server.query(f"KILL CONNECTION {run.wait_for_wait()}")
        assert told("write after KILL", site.write_s()) < SLACK_S
        code, said = run.end()
        assert site.ddl_s() < SLACK_S
    assert code == 4, said
    assert "the connection is lost" in said
    site.require_recovery()


@kinds(*NEW)
def test_all_of_ours_stopped_before_it_is_granted(site: LockSite) -> None:
    """It is granted to nobody then, when the statement before it ends; the server frees it again."""
    with site.blocker(UPDATE) as update, site.backup(delay_s=0, prologue=[UNSEEN]) as run:
        run.wait_for_wait()
        with run.stopped():
            update.end()
            # Granted now, or soon.
            wait_until(lambda: not any(site.ours().values()))
            waited_s = told("write after it was granted", site.write_s())
            assert 0.3 < waited_s < SERVER_HOLD_S + SLACK_S
            assert site.ddl_s() < SLACK_S
        site.require_failure(run, (4,), "snapmgr itself was stopped", "lost", "not granted")


@kinds("mysql-9")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_nobody_left_while_it_waits_with_half_of_its_locks(site: LockSite, how: signal.Signals) -> None:
    """MySQL notices no client's end while a statement waits, and one that failed keeps the locks that it got."""
    with site.blocker(SELECT), site.backup(prologue=[UNSEEN]) as run:
        run.wait_for_wait()
        with ExitStack() as stack:
            if how == signal.SIGSTOP:
                stack.enter_context(run.stopped())
            else:
                run.process.kill()
            waited_s = told(f"write after {how.name}", site.write_s())
            # lock_wait_timeout ends the waiting; then wait_timeout ends what nobody is left for.
            assert waited_s < WAIT_S + SLACK_S + (SERVER_HOLD_S if how == signal.SIGSTOP else 0)
            assert site.locks() == []
            assert site.ddl_s() < SLACK_S
        code, said = run.end()
        assert code == (4 if how == signal.SIGSTOP else -signal.SIGKILL), said
    site.require_recovery()


@kinds("mysql-9")
def test_sigint_while_it_waits(site: LockSite) -> None:
    """What waits in the server is ended: writers would otherwise go on waiting."""
    site.configure(wait_s=20)
    with site.blocker(SELECT), site.backup(prologue=[UNSEEN]) as run:
        run.wait_for_wait()
        run.process.send_signal(signal.SIGINT)
        assert told("write after SIGINT", site.write_s()) < SLACK_S
        code, said = run.end()
        assert site.ours() == {}
    assert code == 130, said
    site.require_recovery()


@kinds("mysql-9")
@pytest.mark.parametrize("answered", [False, True])
def test_nothing_of_a_failed_try_is_left_before_the_next(site: LockSite, *, answered: bool) -> None:
    """A failed FLUSH TABLES WITH READ LOCK keeps the global lock and commits' until its connection ends."""
    # We give up before the server does, which counts whole seconds; or it answers us (error 1205).
    wait_s = 2.0 if answered else 2.1
    site.configure(attempts=2, wait_s=wait_s)
    prologue = [UNSEEN, SLOW_JITTER, LONG_FIRST_TRY, *([DEAF_TO_TIME] if answered else [])]
    with site.blocker(SELECT), site.backup(prologue=prologue) as run:
        seen: list[frozenset[str]] = []
        since: list[float] = []
        while run.process.poll() is None:
            now = frozenset(lock.what for lock in site.locks())
            if not seen or seen[-1] != now:
                seen.append(now)
                since.append(time.monotonic())
        code, said = run.end()
        assert site.locks() == []
        assert site.write_s() < SLACK_S
        assert site.ddl_s() < SLACK_S
    stopped = [("GLOBAL" in now, at) for now, at in zip(seen, since, strict=True)]
    turns = [stopped[0], *(new for old, new in pairwise(stopped) if old[0] != new[0])]
    assert [stops for stops, _ in turns] == [False, True, False, True, False]
    for begin, end in ((turns[1], turns[2]), (turns[3], turns[4])):
        assert told("writers stopped for", end[1] - begin[1]) < wait_s + 1.5
    assert frozenset() in seen[2:-1]
    assert code == 4, said
    assert "not granted in 2 tries" in said
    worst_s = site.load.statistics(since_ns=run.began_ns).worst_s
    assert told("writers' worst", worst_s) < wait_s + 1.5
    site.require_recovery()


@kinds("mysql-9")
@pytest.mark.parametrize("killer", [True, False])
def test_all_connections_taken_while_it_waits(site: LockSite, *, killer: bool) -> None:
    """As when clients pile up behind the lock: what ends our statement is there before. Else the server ends it."""
    without = "q.ConnectionKiller.connect_early = lambda _: None"
    # lock_wait_timeout has whole seconds, here 2 with one that is ready: longer than we wait.
    wait_s = 1.1 if killer else 1.0
    site.configure(wait_s=wait_s)
    kills = counter(site, "Com_kill")
    prologue = [UNSEEN, *([] if killer else [without])]
    with site.blocker(UPDATE), site.backup(prologue=prologue) as run, few_connections(site) as allow:
        run.wait_for_wait()
        allow(1)
        with pytest.raises(pymysql.err.OperationalError, match="Too many connections"):
            site.server.connect(user=ACCOUNT)
        code, said = run.end()
        allow(200)
        assert site.locks() == []
        assert site.ddl_s() < SLACK_S
    assert code == 4, said
    assert "not granted in one try" in said
    assert (counter(site, "Com_kill") > kills + 1) == killer
    worst_s = told("writers' worst", site.load.statistics(since_ns=run.began_ns).worst_s)
    # Without one, FLUSH TABLES WITH READ LOCK may wait three times in the server.
    assert worst_s < (wait_s if killer else 3 * wait_s) + SLACK_S
    site.require_recovery()


@contextmanager
def few_connections(site: LockSite) -> Iterator[Callable[[int], None]]:
    """Yield a function that sets max_connections, even when no more can be made."""
    with site.server.connect() as connection, connection.cursor() as cursor:
        try:
            yield lambda limit: cursor.execute(f"SET GLOBAL max_connections = {limit}")
        finally:
            cursor.execute("SET GLOBAL max_connections = 200")


def counter(site: LockSite, name: str) -> int:
    ((_, value),) = site.server.query(f"SHOW GLOBAL STATUS LIKE '{name}'")
    return int(value)


# ---- what is reported


@each_kind
def test_no_writer_waited_longer_than_is_reported(site: LockSite) -> None:
    """Here for a try that failed, and for one that was granted late."""
    quiet_s = site.load.statistics().worst_s
    for failing in (True, False):
        # A writer that got no processor has waited as well, and nobody could have reported it: not each time, though.
        pairs = []
        while not pairs or (pairs[-1][0] > pairs[-1][1] + 2 * quiet_s + 0.1 and len(pairs) < 4):
            pairs.append(_waited_and_reported(site, failing=failing))
        assert pairs[-1][0] <= pairs[-1][1] + 2 * quiet_s + 0.1, pairs


def _waited_and_reported(site: LockSite, *, failing: bool) -> tuple[float, float]:
    # All tries but the last one give up soon; that one has all the time that we may need.
    site.configure(attempts=2 if failing else 1, hold_s=5, wait_s=30)
    with site.blocker(UPDATE) as update, site.backup(delay_s=0.3, prologue=[UNSEEN, REST_UNTIL_RELEASED]) as run:
        if failing:
            run.wait_for_rest()
        else:
            run.wait_for_wait()
            time.sleep(0.4)
        update.end()
        run.release()
        code, said = run.end()
        assert code == 0, said
    quiesce = site.scene.entries()[-1].manifest.quiesce
    assert isinstance(quiesce, QuiesceRecord)
    worst_s = told("writers' worst", site.load.statistics(since_ns=run.began_ns).worst_s)
    told("reported", quiesce.stall_s)
    assert quiesce.attempts == (2 if failing else 1)
    assert worst_s > (0.18 if failing else 0.6)
    assert quiesce.stall_s < 3 * worst_s
    return worst_s, quiesce.stall_s
