"""Extents, jumps and maps of layouts that are known."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.bench.measure.layout import POINTS, lay_out, read_layout, thin
from snapmgr.contract.errors import StorageError
from snapmgr.system.kernel import Extent

_KIB = 1 << 10
_ENCODED, _UNWRITTEN, _SHARED, _INLINE = 0x8, 0x800, 0x2000, 0x200


@pytest.fixture
def in_memory():
    fd = os.memfd_create("nothing")
    yield fd
    os.close(fd)


def _extents(*places):
    return [Extent(logical=a, physical=b, length=c, flags=d[0] if d else 0) for a, b, c, *d in places]


def test_neighbours_that_touch_are_one():
    found = lay_out(_extents((0, 100, 10), (10, 110, 10), (20, 200, 10)), size_bytes=30)
    assert (found.extents, found.gaps, found.mapped_bytes) == (2, 1, 30)
    assert found.runs == ((0, 100, 20), (20, 200, 10))


def test_hole_is_no_jump_where_the_file_is_in_place():
    apart = lay_out(_extents((0, 100, 10), (50, 150, 10)), size_bytes=60)
    dense = lay_out(_extents((0, 100, 10), (50, 110, 10)), size_bytes=60)
    away = lay_out(_extents((0, 100, 10), (50, 140, 10)), size_bytes=60)
    assert [one.gaps for one in (apart, dense, away)] == [0, 0, 1]
    assert apart.mapped_bytes == 20


def test_going_back_is_a_jump():
    assert lay_out(_extents((0, 100, 10), (10, 90, 10)), size_bytes=20).gaps == 1


def test_compressed_neighbours_are_extents_and_no_jumps():
    # 128 KiB of the file in 40 KiB of the device, one behind the other, then far away.
    length = 128 * _KIB
    places = [(number * length, 40 * _KIB * number, length, _ENCODED) for number in range(8)]
    places += [(8 * length, 900 * length, length, _ENCODED)]
    found = lay_out(_extents(*places), size_bytes=9 * length)
    assert (found.extents, found.gaps, found.encoded) == (9, 1, 9)
    assert "compressed" in found.caveats()[0]


def test_plain_extent_is_not_taken_for_a_compressed_one():
    assert lay_out(_extents((0, 0, 128), (128, 40, 128)), size_bytes=256).gaps == 1


def test_what_is_not_written_is_not_read():
    found = lay_out(_extents((0, 100, 10), (10, 500, 10, _UNWRITTEN), (20, 120, 10)), size_bytes=30)
    assert found.gaps == 0
    assert (found.extents, found.unwritten_bytes) == (3, 10)
    assert "not written" in found.caveats()[0]


def test_data_in_the_inode_are_nowhere():
    found = lay_out(_extents((0, 0, 10, _INLINE)), size_bytes=10)
    assert (found.runs, found.gaps, found.gaps_per_gib) == ((), 0, 0)


def test_shared_bytes_are_told():
    assert lay_out(_extents((0, 0, 10, _SHARED), (10, 10, 5)), size_bytes=15).shared_bytes == 10


def test_gaps_per_gib_are_of_what_is_mapped():
    gib = 1 << 30
    found = lay_out(_extents((0, 0, gib), (gib, 5 * gib, gib), (9 * gib, 7 * gib, 2 * gib)), size_bytes=11 * gib)
    assert found.gaps_per_gib == 0.5


def test_empty_file_has_nothing():
    document = lay_out([], size_bytes=0).document()
    assert document["extents"] == document["gaps"] == document["gaps_per_gib"] == 0
    assert document["points"] == document["caveats"] == []


def test_device_mapper_below_is_a_caveat():
    assert "CoW table" in lay_out([], size_bytes=0, mapped=True).document()["caveats"][0]


def test_file_system_that_does_not_tell_is_an_error(in_memory):
    with pytest.raises(StorageError, match="FIEMAP"):
        read_layout(Path(f"/proc/self/fd/{in_memory}"))


@given(st.lists(st.integers(1, 9), max_size=60), st.integers(1, 40))
def test_map_keeps_within_its_bound_and_spreads(lengths, count):
    runs, at = [], 0
    for number, length in enumerate(lengths):
        runs.append((at, 1000 * number, length))
        at += length
    chosen = thin(runs, count)
    assert len(chosen) <= count
    assert chosen == sorted(set(chosen))
    assert set(chosen) <= set(runs)
    if len(runs) <= count:
        assert chosen == runs
    elif runs:
        # Wherever one looks in the file, a chosen piece begins not further away than a step and the longest piece.
        assert chosen[0] == runs[0]
        nearest = [max(one[0] for one in chosen if one[0] <= place) for place in range(at)]
        assert max(place - near for place, near in enumerate(nearest)) <= at / count + max(lengths) + 1


def test_document_of_many_extents_has_a_map_of_bounded_size():
    extents = [Extent(logical=number * 4096, physical=number * 16384, length=4096) for number in range(100_000)]
    document = lay_out(extents, size_bytes=100_000 * 4096).document()
    assert document["extents"] == document["runs"] == 100_000
    assert POINTS * 0.99 <= len(document["points"]) <= POINTS
