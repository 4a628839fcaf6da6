"""Which ways a backup tries, one after another: the lock if it is free at once, none, and the lock however long."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from msgspec import Struct

from snapmgr.backup import run
from snapmgr.contract.errors import NotQuiescedError
from snapmgr.mysql.lock.levels import LockChoice, LockNeeds, choose
from snapmgr.mysql.lock.lockless import StructureChangedError
from snapmgr.mysql.lock.quiesce import LockBounds
from support.sample import abilities_of

DURABLE = {"sync_binlog": "1", "innodb_flush_log_at_trx_commit": "1"}


class Source(Struct, frozen=True):
    choice: LockChoice | None


def tried(monkeypatch, choice, *results):
    """Return the choices of all tries, and the result or the error of the last one."""
    left, choices = list(results), []

    def take(_ctx, _job, source):
        choices.append(source.choice)
        result = left.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(run, "_take", take)
    try:
        outcome = run._take_any_way(SimpleNamespace(tell=lambda _: None), None, Source(choice))
    except NotQuiescedError as error:
        outcome = error
    return choices, outcome


@pytest.mark.parametrize("position", [True, False])
def test_ddl_without_a_lock_leads_to_another_try_and_then_to_the_lock(monkeypatch, position):
    needs = LockNeeds(engines={"InnoDB": 1}, settings=DURABLE, position=position)
    choice = choose("auto", abilities_of("mysql"), needs)
    changed = StructureChangedError("DDL")
    assert tried(monkeypatch, choice, "taken") == ([choice], "taken")
    assert tried(monkeypatch, choice, changed, "taken") == ([choice, choice], "taken")
    choices, outcome = tried(monkeypatch, choice, changed, changed, "taken")
    assert outcome == "taken"
    assert choices[-1].lock
    assert choices[-1].instead is None
    failure = NotQuiescedError("not granted")
    assert tried(monkeypatch, choice, changed, changed, failure)[1] is failure
    # Any other error ends it at once.
    assert tried(monkeypatch, choice, failure) == ([choice], failure)


def test_a_job_that_asks_for_no_lock_gets_none(monkeypatch):
    needs = LockNeeds(engines={"InnoDB": 1}, settings=DURABLE)
    choice = choose("crash-consistent", abilities_of("mysql"), needs)
    changed = StructureChangedError("DDL")
    assert tried(monkeypatch, choice, changed) == ([choice], changed)


def test_a_lock_that_is_not_needed_makes_writers_wait_briefly_and_kills_nobody():
    bounds = LockBounds(max_stall_s=3, lock_attempts=5, lock_hold_s=10, blocker_wait_s=60, kill_selects_after_s=600)
    brief = bounds.brief
    assert (brief.max_stall_s, brief.lock_attempts, brief.blocker_wait_s) == (0.2, 1, 0)
    assert brief.kill_selects_after_s is None
    assert (brief.lock_hold_s, brief.blocker_age_s) == (10, bounds.blocker_age_s)
