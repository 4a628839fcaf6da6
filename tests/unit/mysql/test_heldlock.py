"""Waiting for the redo log, with LSNs from a scripted server."""

from __future__ import annotations

import time
from unittest.mock import Mock

import pytest

from snapmgr.contract.errors import NotQuiescedError
from snapmgr.mysql.connect.client import Connection
from snapmgr.mysql.lock.heldlock import await_redo


def server(*states: tuple[int, int]) -> Mock:
    """Return a connection whose server states these (made, written) one after another, the last one for ever."""
    answers = [{"innodb_lsn_current": str(current), "innodb_lsn_flushed": str(flushed)} for current, flushed in states]
    connection = Mock(spec=Connection)
    connection.status.side_effect = lambda *_: answers.pop(0) if len(answers) > 1 else answers[0]
    return connection


def test_it_waits_for_what_was_made_at_first_and_not_for_what_comes() -> None:
    connection = server((100, 40), (200, 99), (300, 100), (400, 100))
    await_redo(connection, time.monotonic() + 5)
    assert connection.status.call_count == 3


def test_it_gives_up_before_the_lock_ends() -> None:
    deadline = time.monotonic() + 0.1
    with pytest.raises(NotQuiescedError, match="not in InnoDB's log files yet"):
        await_redo(server((100, 99)), deadline)
    assert time.monotonic() <= deadline + 0.05
