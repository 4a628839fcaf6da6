"""Storages that plugins contribute to the benchmark."""

from __future__ import annotations

import pytest

from snapmgr.api import BenchStorage, SnapmgrError
from snapmgr.bench.model import Parameters
from snapmgr.bench.storage import contributed
from snapmgr.bench.storage.contributed import all_stacks
from snapmgr.bench.storage.stacks import STACKS, backend_table
from snapmgr.config.plugins import Plugin

GIVEN = Parameters(profile="smoke", variant="", size_bytes=1, memory_bytes=1, seed=1)


def contribute(monkeypatch, *storages):
    class Own:
        @classmethod
        def bench_storages(cls):
            return storages

    plugins = [
        Plugin(name="own", distribution="own-storage 1.0", backend=Own, error=None),
        Plugin(name="plain", distribution="x 1", backend=object, error=None),
        Plugin(name="broken", distribution="x 1", backend=None, error=SnapmgrError("broken")),
    ]
    monkeypatch.setattr(contributed, "list_plugins", lambda: plugins)


def test_a_plugin_adds_its_own_before_the_controls(monkeypatch):
    storage = BenchStorage(
        name="own+ext4", title="Own", options={"file_system": "ext4"}, settings={"store": "{point}/copies"}
    )
    contribute(monkeypatch, storage)
    stacks = all_stacks()
    assert set(stacks) == {*STACKS, "own+ext4"}
    names = list(stacks)
    assert names.index("juicefs") < names.index("own+ext4") < names.index("ext4")
    own = stacks["own+ext4"]
    assert (own.backend, own.title, own.options) == ("own", "Own", {"file_system": "ext4"})
    assert backend_table(own, GIVEN) == {}
    assert backend_table(own, GIVEN, point="/run/x") == {"store": "/run/x/copies"}
    assert backend_table(stacks["juicefs"], GIVEN, point="/run/x") == {"cache_root": "/run/x/cache"}


@pytest.mark.parametrize(("name", "why"), [("btrfs", "exists already"), ("ext4", "exists"), ("A/b", "no name")])
def test_a_name_that_is_taken_or_none_is_refused(monkeypatch, name, why):
    contribute(monkeypatch, BenchStorage(name=name, title="x"))
    with pytest.raises(SnapmgrError, match=rf"the backend own \(of own-storage 1.0\) contributes .* {why}"):
        all_stacks()
