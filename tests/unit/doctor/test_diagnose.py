"""Findings: no repair touches foreign objects, and no repair is offered twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from snapmgr.catalog.entry import Entry
from snapmgr.catalog.manifest import encode
from snapmgr.catalog.summary import summarize
from snapmgr.contract.errors import StorageError
from snapmgr.contract.records import Found, Pool
from snapmgr.doctor.diagnose import diagnose
from snapmgr.doctor.facts import Facts, FileFacts, LeaseFacts, PoolFacts
from snapmgr.system.host import Process
from support.sample import NOW, POOL, lease, manifest

US = {"state_dir": "/state", "machine_id": "m"}
RECORD = "f" * 16


def _manifest(number=0, **fields):
    return replace(manifest(number), state_dir="/state", **fields)


def _found(of, **fields):
    ref = of.members[0].ref
    values = {"kind": "snapshot", "pool": ref.pool, "name": ref.name, "snapshot_id": of.id, "ref": ref}
    return Found(**(values | {"note": encode(of)} | fields))


def _facts(*manifests, found=(), error=None, **fields):
    pools = (PoolFacts(pool=POOL, found=tuple(found), error=error),)
    snapshots = tuple(summarize(Entry(manifest=one, verification=None)) for one in manifests)
    values = {"boot_id": "b", "now": NOW, "jobs": frozenset({"nightly"}), "snapshots": snapshots, "pools": pools}
    values["made_here"] = frozenset(one.id for one in manifests if (one.state_dir, one.machine_id) == ("/state", "m"))
    return Facts(**(US | values | fields))


def _repairs(facts):
    return [finding.repair.kind for finding in diagnose(facts) if finding.repair is not None]


def _problems(facts):
    return [finding.what for finding in diagnose(facts) if finding.level == "problem"]


def test_nothing_is_wrong():
    assert _problems(_facts(_manifest(), found=[_found(_manifest())])) == []


@pytest.mark.parametrize(
    ("fields", "repair"),
    [
        ({"state": "pending"}, ["finish-pending"]),
        ({"state": "pending", "proved_at": None, "members": ()}, ["finish-pending"]),
        ({"state": "deleting"}, ["finish-deletion"]),
        ({"state": "broken", "reason": "interrupted before its proof"}, ["remove-remains"]),
        ({"state": "broken", "reason": "interrupted before its proof", "members": ()}, ["remove-remains"]),
        ({"state": "broken", "reason": "its storage is gone"}, ["mark-ready"]),
    ],
)
def test_snapshots_whose_storage_is_there(fields, repair):
    assert _repairs(_facts(_manifest(**fields), found=[_found(_manifest())])) == repair


@pytest.mark.parametrize(
    ("fields", "repair"),
    [
        ({}, ["mark-broken"]),
        ({"state": "broken", "reason": "its storage is gone"}, []),
        ({"state": "broken", "reason": "interrupted before its proof"}, []),
    ],
)
def test_snapshots_whose_storage_is_gone(fields, repair):
    assert _repairs(_facts(_manifest(**fields))) == repair


def test_a_storage_that_does_not_answer_says_nothing():
    facts = _facts(_manifest(), error=StorageError("not there"))
    assert _repairs(facts) == []
    assert _problems(facts) == ["not there"]


def test_a_hanging_helper_is_left():
    helper = Process(pid=7, start_ticks=1, boot_id="b")
    one = _manifest(state="pending", proved_at=None, helper=helper)
    assert _repairs(_facts(one, hanging={one.id: 7})) == []


def test_what_an_active_run_does_is_left_to_it():
    broken = _manifest(state="deleting")
    facts = _facts(broken, found=[_found(broken)], active={"nightly": 12})
    assert _repairs(facts) == []
    assert _problems(facts) == []


def test_something_else_under_our_name_is_never_deleted():
    one = _manifest(state="broken", reason="interrupted before its proof")
    swapped = _found(one, ref=replace(one.members[0].ref, native_id="another"))
    assert _repairs(_facts(one, found=[swapped])) == []
    assert _repairs(_facts(_manifest(), found=[swapped])) == ["mark-broken"]
    # Before there were members only the name and the origin tell.
    bare = replace(one, members=())
    elsewhere = _found(one, ref=replace(one.members[0].ref, volume_id="of something else"))
    assert _repairs(_facts(bare, found=[elsewhere])) == []


def test_a_set_that_lost_a_member_keeps_the_others():
    other = Pool(backend="reflink", id="/other", hint="/other")
    one = _manifest()
    second = replace(one.members[0], ref=replace(one.members[0].ref, pool=other, native_id="second"))
    whole = replace(one, members=(*one.members, second))
    pools = (PoolFacts(pool=POOL, found=(_found(one),)), PoolFacts(pool=other))
    assert _repairs(_facts(whole, pools=pools)) == ["mark-broken"]
    broken = whole.with_state("broken", reason="its storage is gone")
    assert _repairs(_facts(broken, pools=pools)) == []
    assert _problems(_facts(broken, pools=pools)) == []
    silent = (pools[0], PoolFacts(pool=other, error=StorageError("away")))
    assert _repairs(_facts(whole, pools=silent)) == []


def test_a_clone_is_removed_only_where_nobody_else_can_have_made_it():
    one = _manifest()
    clone = _found(one, kind="attachment", name="clone", record_id=RECORD, note=None)
    both = [_found(one), clone]
    assert _repairs(_facts(one, found=both)) == ["remove-clone"]
    assert _repairs(_facts(one, found=both, mounted=frozenset({RECORD}))) == []
    assert _repairs(_facts(replace(one, state_dir="/other"), found=both)) == []
    assert _repairs(_facts(replace(one, state_dir=""), found=both)) == []
    assert _repairs(_facts(replace(one, machine_id="another"), found=both)) == []
    assert _repairs(_facts(found=[clone])) == []
    of_another = replace(clone, ref=replace(one.members[0].ref, native_id="another"))
    assert _repairs(_facts(one, found=[_found(one), of_another])) == []
    assert _repairs(_facts(one, found=both, elsewhere={one.id: "/other"})) == []


def test_a_clone_of_a_damaged_lease_waits_until_that_is_aside():
    one = _manifest()
    clone = _found(one, kind="attachment", name="clone", record_id=RECORD, note=None)
    damaged = FileFacts(path=Path(f"/state/leases/{RECORD}.json"), kind="lease", problem="damaged")
    assert _repairs(_facts(one, found=[_found(one), clone], files=(damaged,))) == ["set-aside"]


@pytest.mark.parametrize(
    ("fields", "alive", "mounted", "repairs"),
    [
        ({}, False, True, ["release"]),  # of another boot
        ({"boot": "b"}, False, True, []),
        ({"boot": "b"}, False, False, ["release"]),
        ({"boot": "b"}, True, False, []),  # about to mount
        ({"boot": "b", "why": "verify"}, True, False, []),
        ({"boot": "b", "why": "verify"}, False, True, ["release"]),
        ({"boot": "b", "why": "prepare"}, False, True, ["release"]),
        ({"boot": "b", "why": "restore"}, False, True, ["release"]),
    ],
)
def test_leases(fields, alive, mounted, repairs):
    one = lease(_manifest())
    boot = fields.get("boot", "another")
    parts = tuple(replace(part, record=replace(part.record, boot_id=boot)) for part in one.parts)
    one = replace(one, parts=parts, why=fields.get("why", "mount"), until=None)
    facts = _facts(
        _manifest(), found=[_found(_manifest())], leases=(LeaseFacts(lease=one, alive=alive, mounted=mounted),)
    )
    assert _repairs(facts) == repairs


def test_debris():
    one = _manifest()
    half = _found(one, kind="debris", ref=None, note=None, why="half")
    assert _repairs(_facts(found=[half])) == ["repair"]
    assert _repairs(_facts(_manifest(state="broken", members=()), found=[half])) == ["repair"]
    assert _repairs(_facts(_manifest(state="deleting"), found=[half])) == ["finish-deletion"]
    assert _repairs(_facts(found=[replace(half, snapshot_id=None)])) == ["repair"]
    # A note may be the last word on a snapshot that was moved; a whole snapshot, or a clone, somebody's work.
    assert _repairs(_facts(found=[replace(half, note=encode(one))])) == []
    assert _repairs(_facts(found=[replace(half, ref=one.members[0].ref)])) == []
    assert _repairs(_facts(found=[replace(half, record_id=RECORD)])) == []
    assert _repairs(_facts(one, found=[_found(one), replace(half, record_id=RECORD)])) == ["repair"]


def test_unknown_snapshots():
    one = _manifest()
    assert _repairs(_facts(found=[_found(one)])) == ["adopt"]
    assert _repairs(_facts(found=[_found(one)], exists=False)) == ["adopt"]
    assert _repairs(_facts(found=[_found(one, note=None)])) == []
    assert _repairs(_facts(found=[_found(one)], elsewhere={one.id: "/other"})) == []
    assert _problems(_facts(found=[_found(one)], elsewhere={one.id: "/other"})) == []
    path = Path("/state/snapshots", one.id, "manifest.json")
    damaged = FileFacts(path=path, kind="manifest", problem="damaged", snapshot_id=one.id)
    assert _repairs(_facts(found=[_found(one)], files=(damaged,))) == ["restore-manifest"]
    assert _repairs(_facts(files=(damaged,))) == []
    for kind in ("too-new", "foreign"):
        assert _repairs(_facts(found=[_found(one)], files=(replace(damaged, kind=kind),))) == []


_STATES = st.sampled_from(["pending", "ready", "deleting", "broken"])
_REASONS = st.sampled_from([None, "its storage is gone", "interrupted before its proof"])


@st.composite
def _anything(draw):
    manifests = []
    for number in draw(st.sets(st.integers(0, 4))):
        one = _manifest(number, state=draw(_STATES), reason=draw(_REASONS))
        if draw(st.booleans()):
            one = replace(one, members=(), proved_at=None)
        manifests.append(replace(one, state_dir=draw(st.sampled_from(["/state", "/other", ""]))))
    found = []
    for number in draw(st.lists(st.integers(0, 4), max_size=6)):
        of = _manifest(number)
        one = _found(of, kind=draw(st.sampled_from(["snapshot", "attachment", "debris"])))
        if one.kind != "snapshot":
            record = draw(st.sampled_from([RECORD, None] if one.kind == "debris" else [RECORD]))
            one = replace(one, note=None, record_id=record, ref=draw(st.sampled_from([of.members[0].ref, None])))
        elif draw(st.booleans()):
            one = replace(one, ref=replace(of.members[0].ref, native_id="another"))
        found.append(replace(one, note=draw(st.sampled_from([one.note, None, b"{"]))))
    error = StorageError("away") if draw(st.booleans()) else None
    return _facts(
        *manifests,
        found=() if error else found,
        error=error,
        active={"nightly": 1} if draw(st.booleans()) else {},
        mounted=frozenset({RECORD}) if draw(st.booleans()) else frozenset(),
        elsewhere={_manifest(0).id: "/other"} if draw(st.booleans()) else {},
    )


@given(_anything())
def test_whatever_there_is(facts):
    """A problem has a repair or a hint; nothing is cured of an active job or a silent storage; nothing foreign goes."""
    known = {one.id for one in facts.snapshots}
    for finding in diagnose(facts):
        if finding.level == "problem":
            assert finding.repair is not None or finding.hint is not None or finding.what == "away"
        if finding.repair is None:
            continue
        assert finding.level == "problem"
        assert finding.job not in facts.active
        kind, about = finding.repair.kind, finding.repair.about
        if facts.pools[0].error is not None:
            assert kind in ("finish-pending", "finish-deletion")
        if isinstance(about, Found):
            assert about.kind != "snapshot"
            assert about.record_id not in facts.mounted
        if kind == "remove-clone":
            assert about.snapshot_id in facts.made_here
        if kind in ("adopt", "restore-manifest"):
            assert about.entry.manifest.id not in known
