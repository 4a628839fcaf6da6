"""The way that a prepare takes: the rule, its reasons, and what must hold for any sizes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from snapmgr.contract.errors import StorageError
from snapmgr.physical.prepare.choice import Facts, choose, needed_bytes, touched_bytes, touched_pages

MB, GB = 10**6, 10**9

REMOTE = Facts(
    file_bytes=(500 * MB,) * 4 + (10 * MB,) * 10,
    redo_bytes=128 << 20,
    remote=True,
    scratch_free_bytes=100 * GB,
    storage_free_bytes=1 << 50,
    can_clone=True,
    can_remount=True,
    can_overlay=True,
)


def _way(facts, **wanted):
    try:
        return choose(facts, source="/b", **wanted).way
    except StorageError:
        return None


def test_touched_pages_are_as_measured():
    assert touched_pages(REMOTE.data_bytes, REMOTE.redo_bytes) == pytest.approx(32_000, rel=0.05)
    assert touched_bytes((5 * MB,) * 10_000, 300) == pytest.approx(300 * 5 * MB, rel=0.05)
    assert touched_bytes((5 * MB,), 300) == 5 * MB
    assert touched_bytes((), 300) == 0


def test_remote_storage_goes_by_scratch_if_the_copy_fits():
    choice = choose(REMOTE, source="/b")
    assert (choice.way, choice.result, choice.why) == ("scratch", "scratch", "copied to scratch")
    assert choice.scratch_needed_bytes == round(1.02 * REMOTE.data_bytes) + (64 << 20)
    assert choice.storage_needed_bytes == 0
    back = choose(REMOTE, source="/b", result="storage")
    assert (back.way, back.result) == ("scratch", "storage")
    assert back.storage_needed_bytes == REMOTE.changed_bytes + (64 << 20)


def test_overlay_if_only_the_changes_fit():
    # Little redo for many small tables: few of them are changed.
    many = replace(REMOTE, file_bytes=(5 * MB,) * 10_000, redo_bytes=1 << 20, scratch_free_bytes=5 * GB)
    choice = choose(many, source="/b")
    assert (choice.way, choice.result) == ("overlay", "storage")
    assert choice.scratch_needed_bytes < 5 * GB
    assert "not copied to scratch: 47.6 GiB of scratch space are needed, 4.7 GiB are free" in choice.why


@pytest.mark.parametrize(
    ("change", "way"),
    [
        ({"scratch_free_bytes": 1500 * MB}, "writeback"),
        ({"scratch_free_bytes": 1 * GB, "can_remount": False}, "storage"),
        ({"can_clone": False}, "scratch"),
        ({"can_clone": False, "scratch_free_bytes": 1 * GB}, None),
        ({"scratch_free_bytes": 0}, "storage"),
        ({"scratch_free_bytes": 0, "storage_free_bytes": 0}, None),
    ],
)
def test_ways_that_are_not_possible_are_not_chosen(change, way):
    assert _way(replace(REMOTE, can_overlay=False, **change)) == way


def test_storage_of_this_machine_is_cloned():
    local = replace(REMOTE, remote=False, can_remount=False)
    choice = choose(local, source="/b")
    assert (choice.way, choice.result, choice.scratch_needed_bytes) == ("storage", "storage", 0)
    assert _way(local, result="scratch") == "scratch"
    assert _way(replace(local, can_clone=False)) == "scratch"


def test_strategy_result_and_way_bound_the_choice():
    assert _way(REMOTE, strategy="storage") == "writeback"
    assert _way(REMOTE, strategy="overlay") == "overlay"
    assert _way(REMOTE, way="storage") == "storage"
    assert _way(REMOTE, strategy="storage", result="scratch") is None
    assert _way(REMOTE, strategy="overlay", result="scratch") is None


_facts = st.builds(
    Facts,
    file_bytes=st.lists(st.integers(min_value=0, max_value=10**12), min_size=1, max_size=20).map(tuple),
    redo_bytes=st.integers(min_value=0, max_value=10**12),
    remote=st.booleans(),
    scratch_free_bytes=st.integers(min_value=0, max_value=10**14),
    storage_free_bytes=st.integers(min_value=0, max_value=10**14),
    can_clone=st.booleans(),
    can_remount=st.booleans(),
    can_overlay=st.booleans(),
)


@given(_facts, st.sampled_from([None, "scratch", "storage"]))
def test_a_chosen_way_has_room_and_its_abilities(facts, result):
    if _way(facts, result=result) is None:
        with pytest.raises(StorageError, match="cannot be prepared here: ."):
            choose(facts, source="/b", result=result)
        return
    choice = choose(facts, source="/b", result=result)
    assert choice.result == (result or choice.result)
    assert choice.way == "scratch" or choice.result == "storage"
    assert (choice.scratch_needed_bytes, choice.storage_needed_bytes) == needed_bytes(choice.way, facts, result)
    assert choice.scratch_needed_bytes <= facts.scratch_free_bytes
    assert choice.storage_needed_bytes <= facts.storage_free_bytes
    assert facts.can_clone or choice.result == "scratch"
    assert facts.can_remount or choice.way != "writeback"
    assert facts.can_overlay or choice.way != "overlay"


@given(st.integers(min_value=0, max_value=10**13), st.integers(min_value=0, max_value=10**13))
def test_no_more_is_touched_than_there_is(data_bytes, redo_bytes):
    pages = touched_pages(data_bytes, redo_bytes)
    assert 0 <= pages <= data_bytes / (16 << 10) + 1
    assert 0 <= touched_bytes((data_bytes,), pages) <= data_bytes
