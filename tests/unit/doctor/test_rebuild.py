"""Notes: each one that snapmgr wrote can be adopted, and a forged one does nothing."""

from __future__ import annotations

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from snapmgr.access.attach import part_folders
from snapmgr.access.note import decode_note, encode_note
from snapmgr.catalog.manifest import Verification, encode
from snapmgr.catalog.store import Entry
from snapmgr.contract.records import Found, Intent, Pool
from snapmgr.doctor.rebuild import Adoption, Refusal, adopt, claimed_by, job_of
from support.sample import NOW, POOL, manifest

PASSED = Verification(at=NOW, result="passed", duration_s=2.5, checks=("it started",))
OURS = replace(manifest(), state_dir="/state")
ANSWERED = frozenset({(POOL.backend, POOL.id)})


def _set(*pools: Pool):
    """Return a snapshot with a member in each of `pools`."""
    one = OURS.members[0]
    members = tuple(
        replace(
            one,
            ref=replace(one.ref, pool=pool, name=f"{OURS.id}@{number}", native_id=f"n{number}", volume_id=f"v{number}"),
        )
        for number, pool in enumerate(pools)
    )
    intents = tuple(
        Intent(pool=member.ref.pool, volume_id=member.ref.volume_id, name=member.ref.name) for member in members
    )
    return replace(OURS, members=members, intents=intents)


def _found(of, note=None, number=0, **fields):
    ref = of.members[number].ref
    values = {"kind": "snapshot", "pool": ref.pool, "name": ref.name, "snapshot_id": of.id, "ref": ref}
    return Found(**(values | {"note": encode(of) if note is None else note} | fields))


def _adopt(*found, answered=ANSWERED, state_dir="/state", machine_id="m"):
    return adopt(found, answered, state_dir=state_dir, machine_id=machine_id)


def test_a_note_brings_back_what_was_written():
    entry = Entry(manifest=replace(OURS, pinned=True), verification=PASSED)
    result = _adopt(_found(OURS, encode_note(entry)))
    assert result == Adoption(entry=entry)
    assert encode(result.entry.manifest) == encode(entry.manifest)
    assert encode(result.entry.verification) == encode(PASSED)


def test_a_note_without_a_verification_is_the_manifest():
    assert encode_note(Entry(manifest=OURS, verification=None)) == encode(OURS)
    assert decode_note(encode(OURS), "it") == (OURS, None)


def test_a_long_verification_loses_its_texts_but_not_its_result():
    long = replace(PASSED, result="failed", failures=("x" * 1000,) * 100)
    note = encode_note(Entry(manifest=OURS, verification=long))
    assert len(note) <= 64 << 10
    assert decode_note(note, "it") == (OURS, replace(long, checks=(), failures=()))


def test_what_differs_is_said_and_ours_from_now_on():
    result = _adopt(_found(OURS), state_dir="/other", machine_id="n")
    assert result.rewritten
    assert result.entry.manifest == replace(OURS, state_dir="/other")
    assert result.remarks == ("taken on another machine (m)", "taken for the state directory /state")
    older = replace(OURS, state_dir="")
    assert _adopt(_found(older)) == Adoption(entry=Entry(manifest=older, verification=None))


def test_a_folder_of_copies_that_is_mounted_elsewhere_now():
    moved = Pool(backend=POOL.backend, id="/elsewhere", hint="/elsewhere")
    there = _found(OURS, ref=replace(OURS.members[0].ref, pool=moved), pool=moved)
    result = _adopt(there, answered={(moved.backend, moved.id)})
    assert {member.ref.pool for member in result.entry.manifest.members} == {moved}
    assert {intent.pool for intent in result.entry.manifest.intents} == {moved}
    # While the place that it names is there, it is another one's.
    assert isinstance(_adopt(there, answered={(moved.backend, moved.id), *ANSWERED}), Refusal)
    assert isinstance(_adopt(_found(OURS), there), Refusal)


def test_a_set_is_taken_over_whole_or_not_at_all():
    other = Pool(backend=POOL.backend, id="/other", hint="/other")
    of = _set(POOL, other)
    answered = {*ANSWERED, (other.backend, other.id)}
    whole = [_found(of, number=0), _found(of, number=1)]
    assert _adopt(*whole, answered=answered) == Adoption(entry=Entry(manifest=of, verification=None))
    assert "it is incomplete" in _adopt(whole[0], answered=answered).why
    # One note is enough; two that differ in more than pins are one too many.
    assert isinstance(_adopt(whole[0], replace(whole[1], note=None), answered=answered), Adoption)
    pinned = replace(whole[1], note=encode(replace(of, pinned=True)))
    assert _adopt(whole[0], pinned, answered=answered).entry.manifest.pinned
    contrary = replace(whole[1], note=encode(replace(of, path="/srv/other")))
    assert "contradict" in _adopt(whole[0], contrary, answered=answered).why


@pytest.mark.parametrize(
    "change",
    [
        {"id": "nightly.20260131T023000Z.ffffffff"},
        {"id": "../../etc"},
        {"job": "other"},
        {"job": "../../etc"},
        {"state": "pending"},
        {"state": "deleting"},
        {"state": "broken"},
        {"proved_at": None},
        {"taken_at": None},
        {"members": ()},
        {"intents": ()},
        {"path": "relative"},
        {"members": (replace(OURS.members[0], subpath="../../etc"),)},
        {"members": (replace(OURS.members[0], subpath="/etc"),)},
        {"members": (replace(OURS.members[0], subpath="a/../../etc"),)},
        {"members": (replace(OURS.members[0], path="/srv/.."),)},
        {"members": (replace(OURS.members[0], path="relative"),)},
        {"members": (replace(OURS.members[0], places={"/srv": "../x"}),)},
        {"members": (replace(OURS.members[0], places={"srv": ""}),)},
        {"members": (replace(OURS.members[0], ref=replace(OURS.members[0].ref, native_id="another")),)},
        {"members": (replace(OURS.members[0], ref=replace(OURS.members[0].ref, volume_id="another")),)},
        {"members": (replace(OURS.members[0], ref=replace(OURS.members[0].ref, snapshot_id="another")),)},
        {"members": (replace(OURS.members[0], ref=replace(OURS.members[0].ref, name="../another")),)},
        {"members": OURS.members * 2},
        {"position": replace(OURS.position, file="../../etc/passwd")},
        {"server": replace(OURS.server, datadir="relative")},
        {"server": replace(OURS.server, settings={"innodb_page_size": "1\nplugin_load=evil"})},
        {"server": replace(OURS.server, settings={"a b": "1"})},
    ],
)
def test_a_note_that_says_what_snapmgr_does_not_write_is_refused(change):
    assert isinstance(_adopt(_found(OURS, encode(replace(OURS, **change)))), Refusal)


def test_a_note_may_not_give_a_snapshot_another_name():
    ref = replace(OURS.members[0].ref, name="../../another")
    other = replace(
        OURS,
        members=(replace(OURS.members[0], ref=ref),),
        intents=(replace(OURS.intents[0], name=ref.name),),
    )
    assert isinstance(_adopt(_found(OURS, encode(other))), Refusal)


def test_a_note_of_a_newer_schema_is_refused():
    assert "schema 2" in _adopt(_found(OURS, encode(OURS).replace(b'"schema": 1', b'"schema": 2', 1))).why


@pytest.mark.parametrize(
    "name", ["../../etc", "", ".", "nightly", "nightly.20260131T023000Z.3f9a2c1b\n", "a/b.20260131T023000Z.3f9a2c1b"]
)
def test_a_name_that_is_no_id_is_refused(name):
    assert job_of(name) is None
    assert isinstance(_adopt(_found(OURS, snapshot_id=name)), Refusal)


def _is_harmless(result) -> None:
    """Whatever a note says: what it is taken over as leads nowhere but to what the storage itself holds."""
    if isinstance(result, Refusal):
        return
    taken = result.entry.manifest
    assert (taken.id, taken.job, taken.state) == (OURS.id, OURS.job, "ready")
    assert [member.ref.identity for member in taken.members] == [member.ref.identity for member in OURS.members]
    assert [member.ref.name for member in taken.members] == [member.ref.name for member in OURS.members]
    for member in taken.members:
        for path in (member.subpath, *member.places.values()):
            assert os.path.normpath(os.path.join("/point", path)).startswith("/point")
    for folder in part_folders(taken):
        assert folder not in (".", "..")
        assert "/" not in folder
    # It can be written and read again.
    assert decode_note(encode_note(result.entry), "it") == (taken, result.entry.verification)


_NOTE = encode_note(Entry(manifest=OURS, verification=PASSED))


@given(st.integers(0, len(_NOTE) - 1), st.binary(max_size=6), st.integers(0, 30))
def test_bytes_of_a_note_that_were_changed(at, put, dropped):
    note = _NOTE[:at] + put + _NOTE[at + dropped :]
    claimed_by(note)
    _is_harmless(_adopt(_found(OURS, note)))


@given(st.binary())
def test_any_bytes(note):
    claimed_by(note)
    _is_harmless(_adopt(_found(OURS, note)))


_NASTY = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=8),
    st.sampled_from(["../../etc", "/etc", "..", "\0", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59-14:00", "ready"]),
    st.lists(st.text(max_size=3), max_size=2),
    st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
)


def _paths(value, path=()):
    yield path
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from _paths(inner, (*path, key))


@given(st.data())
def test_values_of_a_note_that_were_exchanged(data):
    document = json.loads(_NOTE)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from([path for path in _paths(document) if path]))
        place = document
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = data.draw(_NASTY)
    note = json.dumps(document).encode()
    claimed_by(note)
    _is_harmless(_adopt(_found(OURS, note)))
