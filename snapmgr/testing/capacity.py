"""Tests the contract of the optional abilities `CapacityReporting`, `AutoExtending` and `ScratchAttaching`."""

from __future__ import annotations

from contextlib import suppress

import pytest

from snapmgr.api import AutoExtending, CapacityReporting, Gauge, NotFoundError, ScratchAttaching, StorageError
from snapmgr.testing.lab import Contract, Lab, new_record
from snapmgr.testing.trees import plant


class CapacityContract(Contract):
    """The contract of backends with these abilities; others skip it."""

    def test_gauges(self, lab: Lab) -> None:
        """Gauges have a name and sound numbers, and belong to existing pools and snapshots."""
        backend = lab.backend()
        if not isinstance(backend, CapacityReporting):
            return
        assert backend.gauges(()) == ()
        origin = lab.make_origin()
        plant(origin)
        first, second = lab.take_one(origin), lab.take_one(origin)
        gauges = backend.gauges((first.pool,))
        for gauge in gauges:
            assert isinstance(gauge, Gauge)
            assert gauge.name
            assert gauge.pool == first.pool
            assert 0 <= gauge.used_bytes <= gauge.size_bytes
            assert gauge.valid
            # Only a snapshot can be lost, and it is in the inventory.
            assert (gauge.ref is not None) == (gauge.when_full == "snapshot_lost")
        shared = [gauge.name for gauge in gauges if gauge.ref is None]
        assert len(set(shared)) == len(shared), "shared reservoirs have unique names"
        there = {found.ref for found in lab.found(first.pool) if found.kind == "snapshot"}
        assert {gauge.ref for gauge in gauges if gauge.ref is not None} <= there

        backend.delete(first)
        left = {gauge.ref.identity for gauge in backend.gauges((second.pool,)) if gauge.ref is not None}
        assert first.identity not in left
        headroom = {reservoir.name for reservoir in backend.headroom(lab.volume(origin))}
        assert set(shared) <= headroom, "the same spaces have the same names"
        with lab.unreachable(second.pool), pytest.raises(StorageError):
            backend.gauges((second.pool,))

    def test_auto_extend(self, lab: Lab) -> None:
        """A fresh snapshot needs no more room, and a deleted one none."""
        backend = lab.backend()
        if not isinstance(backend, AutoExtending):
            return
        origin = lab.make_origin()
        first, second = lab.take_one(origin), lab.take_one(origin)
        backend.delete(first)
        assert backend.auto_extend(second) is None
        with suppress(NotFoundError):
            assert backend.auto_extend(first) is None

    def test_sound_attachment(self, lab: Lab) -> None:
        """An attachment can be trusted, before and after it is written to."""
        backend = lab.backend()
        if not isinstance(backend, ScratchAttaching):
            return
        origin = lab.make_origin()
        record = new_record(lab.take_one(origin), writable=True)
        with lab.reached(backend.attach(record), writable=True) as volume:
            assert backend.attachment_problem(record) is None
            (lab.inside(volume, origin) / "written").write_bytes(b"something")
            assert backend.attachment_problem(record) is None
        backend.detach(record)
