"""The flushes before a lock: repeated until one is short, given up when they get no shorter."""

from __future__ import annotations

import pytest

from snapmgr.backup import flush
from snapmgr.bench.storage.workbench import FLUSH_TARGET_S
from snapmgr.config.model import Job


class Storage:
    """Flushes that take these seconds, on a clock of its own."""

    def __init__(self, monkeypatch, *seconds):
        self.left, self.now, self.flushes = list(seconds), 0.0, 0
        monkeypatch.setattr(flush.time, "monotonic", lambda: self.now)

    def sync(self):
        self.flushes += 1
        self.now += self.left.pop(0)


@pytest.mark.parametrize(
    ("seconds", "flushes"),
    [
        ((0.05,), 1),
        ((2.0, 0.4, 0.03, 9.0), 3),
        # No shorter by a tenth: somebody writes as fast as the storage.
        ((2.0, 1.9, 9.0), 2),
        ((2.0, 1.0, 5.0, 9.0), 3),
        # Eight at most, however they shrink.
        (tuple(0.8**number * 100 for number in range(20)), 8),
    ],
)
def test_it_flushes_until_one_is_short_or_no_shorter(seconds, flushes, monkeypatch):
    storage = Storage(monkeypatch, *seconds)
    flush.flush_until_short(storage, 0.05)
    assert storage.flushes == flushes


def test_the_benchmark_flushes_until_the_default_of_a_job():
    assert Job(name="j", source="directory").sync_target_s == FLUSH_TARGET_S
