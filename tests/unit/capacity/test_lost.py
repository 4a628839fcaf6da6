"""Snapshots that are lost because they overflowed, with a storage that says so."""

from __future__ import annotations

import re
import signal
import threading
import time
from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from snapmgr.access import autoextend as relief
from snapmgr.access.attach import attach
from snapmgr.access.storage_check import check_storage
from snapmgr.backup.sweep import sweep
from snapmgr.capacity.lost import mark_all_lost, removing_if_lost, require_sound_reads
from snapmgr.capacity.read import _path, read_capacity, sample_capacity
from snapmgr.capacity.series import CapacityLimits, add_samples
from snapmgr.catalog.manifest import encode
from snapmgr.catalog.store import Entry
from snapmgr.catalog.summary import summarize
from snapmgr.config.load import load_config
from snapmgr.context import Context
from snapmgr.contract.errors import InUseError, LostError, MissingRequirementError, StorageError
from snapmgr.contract.records import Found, Gauge, Pool, Reason
from snapmgr.doctor.collect import collect_facts
from snapmgr.doctor.diagnose import diagnose
from snapmgr.doctor.facts import Facts, PoolFacts
from snapmgr.doctor.fix import fix
from snapmgr.keep.delete import examine
from snapmgr.system.boot import boot_id
from support.sample import NOW, POOL, lease, manifest

GIB = 1 << 30
IDS = [manifest(number).id for number in range(3)]


class Storage:
    """A backend whose snapshots can overflow: by snapshot id, how much is used of 1 GiB; None: it overflowed."""

    name = "reflink"

    def __init__(self):
        self.used = dict.fromkeys(IDS, 0.25)
        self.shared = 0.5
        self.silent = False
        self.problem = None
        self.auto_extended = []
        self.relief = lambda: None
        self.blocked = set()
        self.asked = 0

    def missing(self):
        return ()

    def _answer(self):
        if self.silent:
            raise StorageError("the pool does not answer")

    def _refs(self):
        return {one.id: one.members[0].ref for one in map(manifest, range(3)) if one.id in self.used}

    def gauges(self, pools):
        self._answer()
        self.asked += 1
        assert pools == (POOL,)
        shared = Gauge(
            name="data of the pool",
            size_bytes=GIB,
            used_bytes=int(self.shared * GIB),
            when_full="origin_errors",
            pool=POOL,
        )
        own = [
            Gauge(
                name=f"CoW table of {snapshot_id}",
                size_bytes=GIB,
                used_bytes=GIB if used is None else int(used * GIB),
                when_full="snapshot_lost",
                pool=POOL,
                ref=self._refs()[snapshot_id],
                valid=used is not None,
            )
            for snapshot_id, used in self.used.items()
        ]
        return (shared, *own)

    def auto_extend(self, ref):
        self.auto_extended.append((ref.snapshot_id, threading.current_thread().name))
        self.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        return self.relief()

    def attachment_problem(self, record):
        assert record.ref.snapshot_id in IDS
        return self.problem

    def inventory(self, _pools, *, notes=True):  # noqa: ARG002
        self._answer()
        return tuple(
            Found(kind="snapshot", pool=POOL, name=ref.name, snapshot_id=snapshot_id, ref=ref, note=encode(one))
            for snapshot_id, ref in self._refs().items()
            for one in map(manifest, range(3))
            if one.id == snapshot_id
        )

    def delete(self, ref, *, wait="name"):
        del wait
        self._answer()
        self.used.pop(IDS[int(ref.native_id[1:])], None)


@pytest.fixture
def storage():
    return Storage()


@pytest.fixture
def said():
    return []


@pytest.fixture
def ctx(config, catalog, storage, said):
    for one in catalog.leases()[0]:
        catalog.drop_lease(one)
    return Context(config=load_config(config), catalog=catalog, tell=said.append, _backends={"reflink": storage})


def settle(ctx):
    return mark_all_lost(ctx, [entry.manifest for entry in ctx.catalog.entries("nightly")[0]])


def states(ctx):
    return [entry.manifest.state for entry in ctx.catalog.entries()[0]]


def test_a_lost_snapshot_is_broken_with_its_time_and_its_storage_goes(ctx, storage):
    assert settle(ctx) == ()
    storage.used[IDS[1]] = None
    (error,) = settle(ctx)
    assert isinstance(error, LostError)
    assert states(ctx) == ["ready", "broken", "ready"]
    assert list(storage.used) == [IDS[0], IDS[2]]
    reason = ctx.catalog.load(IDS[1]).manifest.reason
    assert reason.startswith("its CoW table overflowed between 20")
    assert reason.endswith(": 1.0 GiB of 1.0 GiB")
    assert settle(ctx) == ()


def test_a_sweep_reports_what_was_lost(ctx, storage):
    storage.used[IDS[2]] = None
    with ctx.catalog.job_lock("nightly"):
        (error,) = sweep(ctx, "nightly")
    assert isinstance(error, LostError)
    assert f"snapshot {IDS[2]} is lost" in error.message


def test_what_is_lost_and_in_use_is_broken_at_once_and_removed_once_it_is_not_in_use(ctx, storage, said):
    mount = lease(manifest(1))
    ctx.catalog.write_lease(mount)
    storage.used[IDS[1]] = None
    (lost,) = settle(ctx)
    assert isinstance(lost, LostError)
    assert states(ctx)[1] == "broken"
    assert any("could not be deleted now" in line and "is attached" in line for line in said)
    # As long as somebody looks at it, each run says so.
    (error,) = settle(ctx)
    assert isinstance(error, InUseError)
    assert IDS[1] in storage.used
    ctx.catalog.drop_lease(mount)
    assert settle(ctx) == ()
    assert IDS[1] not in storage.used


def test_of_a_set_only_what_ran_full_goes_and_the_rest_is_kept_for_somebody_to_look_at(ctx, storage):
    one, other = manifest(1), manifest(2)
    # As the storage marks both: with the id of the snapshot.
    second = replace(other.members[0], ref=replace(other.members[0].ref, snapshot_id=one.id))
    ctx.catalog.write(replace(one, members=(*one.members, second)))
    ctx.catalog.forget(other.id)
    storage.used[IDS[2]] = None
    (error,) = settle(ctx)
    assert IDS[1] in error.message
    assert list(storage.used) == [IDS[0], IDS[1]]
    assert settle(ctx) == ()
    (finding,) = [one for one in diagnose(collect_facts(ctx)) if "is BROKEN, and part of it remains: " in one.what]
    assert (finding.level, finding.repair) == ("note", None)
    (verdict,) = examine(ctx, [IDS[1]])
    assert verdict.rules == ("its remaining data may be the last copy",)


def test_a_storage_that_does_not_answer_loses_nothing(ctx, storage, said):
    storage.used[IDS[1]] = None
    storage.silent = True
    assert settle(ctx) == ()
    assert states(ctx) == ["ready"] * 3
    assert said == ["warning: cannot read how full /nowhere/snapshots is: the pool does not answer"]


def test_each_pool_is_asked_once_and_a_sample_is_kept(ctx, storage):
    manifests = [entry.manifest for entry in ctx.catalog.entries()[0]]
    sample_capacity(ctx, manifests)
    storage.used[IDS[0]] = 0.5
    sample_capacity(ctx, manifests)
    assert storage.asked == 2
    fill = read_capacity(ctx.catalog, POOL)
    assert [one.used_bytes for one in fill.of_snapshot("n0").samples] == [GIB // 4, GIB // 2]
    assert len(fill.of_name("data of the pool").samples) == 2
    (path,) = (ctx.catalog.path / "capacity").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("pool_id", "name"),
    [
        ("46a30f69-c461-3948-b623-c827f6827e8b", "btrfs-46a30f69-c461-3948-b623-c827f6827e8b.json"),
        ("/srv/copies", None),
        ("../../etc/x", None),
        ("Käse", None),
        ("a" * 300, None),
    ],
)
def test_the_samples_of_a_pool_are_in_a_file_of_its_own(ctx, pool_id, name):
    pool = Pool(backend="btrfs", id=pool_id, hint="/mnt")
    path = _path(ctx.catalog, pool)
    assert path.parent == ctx.catalog.path / "capacity"
    assert re.fullmatch(r"[0-9a-f]{32}\.json", path.name) if name is None else path.name == name
    assert path != _path(ctx.catalog, replace(pool, backend="lvm"))


@pytest.mark.parametrize("content", [b"", b'{"schema": 99}', b'{"backend": "x", "pool_id": "y"}'])
def test_samples_that_cannot_be_read_begin_anew(ctx, content):
    sample_capacity(ctx, [manifest()])
    (path,) = (ctx.catalog.path / "capacity").iterdir()
    path.write_bytes(content)
    assert read_capacity(ctx.catalog, POOL) is None
    assert ("reflink", POOL.id) in sample_capacity(ctx, [manifest()])
    assert len(read_capacity(ctx.catalog, POOL).of_snapshot("n0").samples) == 1


def test_a_sample_that_cannot_be_kept_is_said_and_ends_nothing(ctx, said):
    (ctx.catalog.path / "capacity").write_text("in the way")
    assert settle(ctx) == ()
    assert any("could not be kept" in line for line in said)


def test_a_lost_snapshot_cannot_be_attached(ctx, storage):
    storage.used[IDS[0]] = None
    with pytest.raises(LostError, match="is lost: its CoW table overflowed between"):
        attach(ctx, ctx.catalog.load(IDS[0]), writable=True, why="mount")
    assert ctx.catalog.leases()[0] == []
    # Attaching refuses; only the command that uses the snapshot decides that it goes.
    assert (states(ctx)[0], IDS[0] in storage.used) == ("ready", True)
    with pytest.raises(LostError), removing_if_lost(ctx, manifest(0)):
        attach(ctx, ctx.catalog.load(IDS[0]), writable=True, why="mount")
    assert (states(ctx)[0], IDS[0] in storage.used) == ("broken", False)
    with pytest.raises(StorageError, match="BROKEN: its CoW table overflowed"):
        attach(ctx, ctx.catalog.load(IDS[0]), writable=True, why="mount")


def test_what_was_read_through_scratch_space_that_is_full_is_not_believed(ctx, storage):
    used = lease(manifest(0))
    require_sound_reads(ctx, used, manifest(0))
    storage.problem = Reason(what="its scratch file is full", hint="raise scratch_size")
    with pytest.raises(MissingRequirementError, match=r"its scratch file is full") as caught:
        require_sound_reads(ctx, used, manifest(0))
    assert caught.value.hint == "raise scratch_size"
    # Where the snapshot itself is lost, that is why.
    storage.used[IDS[0]] = None
    with pytest.raises(LostError):
        require_sound_reads(ctx, used, manifest(0))


def test_a_lost_snapshot_takes_nobodys_place(ctx, storage):
    # The newest VERIFIED one is the oldest; the newest READY one is lost.
    storage.used[IDS[2]] = None
    assert check_storage(ctx, [manifest(2)]) == {IDS[2]: "lost"}
    verdicts = {verdict.id: verdict.rules for verdict in examine(ctx, IDS)}
    assert verdicts[IDS[2]] == ()
    assert "newest READY" in verdicts[IDS[1]]


# ---- doctor


def facts(storage, entries, **fields):
    capacity = add_samples(None, POOL, storage.gauges((POOL,)), NOW + timedelta(hours=4))
    pools = (PoolFacts(pool=POOL, found=storage.inventory((POOL,)), capacity=capacity),)
    limits = {"nightly": CapacityLimits(share=0.8, until=NOW + timedelta(hours=28))}
    return Facts(
        state_dir="/state",
        machine_id="m",
        boot_id="b",
        now=NOW + timedelta(hours=4),
        jobs=frozenset({"nightly"}),
        snapshots=tuple(map(summarize, entries)),
        pools=pools,
        limits=limits | fields,
    )


def problems(facts):
    return [(one.what, one.repair.kind if one.repair else None) for one in diagnose(facts) if one.level == "problem"]


def test_doctor_says_what_is_lost_and_what_will_be(storage):
    entries = tuple(Entry(manifest=manifest(number), verification=None) for number in range(3))
    storage.used = dict(zip(IDS, (None, 0.9, 0.01), strict=True))
    lost, soon = problems(facts(storage, entries))
    assert lost[0].startswith(f"{IDS[0]} is lost: its CoW table overflowed between")
    assert lost[1] == "mark-lost"
    assert soon == (
        f"CoW table of {IDS[1]} is 90% full (921.6 MiB of 1.0 GiB), full in 20 min; "
        "once it is full, the snapshot is lost",
        None,
    )


def test_doctor_says_what_mounts_are_not_to_be_believed(ctx, storage):
    here = lease(manifest(0))
    record = replace(here.parts[0].record, boot_id=boot_id())
    mount = next(one for one in ctx.mounter.mounts() if one.point == "/")
    part = replace(here.parts[0], record=record, mounted=f"{mount.device} {mount.root}")
    ctx.catalog.write_lease(replace(here, parts=(part,), point="/", until=None))
    assert not [one for one in diagnose(collect_facts(ctx)) if one.subject == "/"]
    storage.problem = Reason(what="its scratch file is full", hint="raise scratch_size")
    (finding,) = [one for one in diagnose(collect_facts(ctx)) if one.subject == "/"]
    assert (finding.level, finding.what, finding.repair) == ("problem", "its scratch file is full", None)
    assert "raise scratch_size; to unmount it: snapmgr umount" in finding.hint


def test_doctor_mends_what_is_lost(ctx, storage):
    storage.used[IDS[1]] = None
    fixed = fix(ctx, (POOL,))
    assert [(one.repair.kind, one.result) for one in fixed.actions if one.repair.kind == "mark-lost"] == [
        ("mark-lost", "done")
    ]
    assert states(ctx)[1] == "broken"
    assert IDS[1] not in storage.used


# ---- more room


def test_what_is_used_is_looked_after_until_the_end(ctx, storage, said, monkeypatch):
    monkeypatch.setattr(relief, "EVERY_S", 0.01)
    storage.relief = lambda: "enlarged" if len(storage.auto_extended) == 2 else None
    with relief.auto_extended(ctx, manifest(0)):
        deadline = time.monotonic() + 10
        while len(storage.auto_extended) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
    count = len(storage.auto_extended)
    assert count >= 4
    assert said == ["enlarged"]
    time.sleep(0.05)
    assert len(storage.auto_extended) == count
    assert {name for _, name in storage.auto_extended} == {"autoextend"}
    # Signals are for the main thread, which acts on them, or holds them back.
    assert signal.SIGTERM in storage.blocked
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_that_there_is_no_more_room_is_said_once_and_ends_nothing(ctx, storage, said, monkeypatch):
    monkeypatch.setattr(relief, "EVERY_S", 0.01)

    def refuse():
        raise StorageError("nothing is free in vg0")

    storage.relief = refuse
    with relief.auto_extended(ctx, manifest(0)):
        deadline = time.monotonic() + 10
        while len(storage.auto_extended) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert said == ["warning: nothing is free in vg0"]


# ---- the command line


def keep_samples(ctx, storage, *shares):
    """Write down samples of the newest snapshot's room, an hour apart, the last one now."""
    capacity, now = None, datetime.now(UTC)
    for number, share in enumerate(shares):
        storage.used[IDS[2]] = share
        at = now - timedelta(hours=len(shares) - 1 - number)
        capacity = add_samples(capacity, POOL, storage.gauges((POOL,)), at)
    sample_capacity(ctx, [manifest(2)])
    (path,) = (ctx.catalog.path / "capacity").iterdir()
    path.write_bytes(encode(capacity))


def test_status_list_and_show_tell_the_forecast(ctx, storage, run):
    keep_samples(ctx, storage, 0.1, 0.11)
    code, out, _ = run("status")
    assert f"nightly: CoW table of {IDS[2]} is 11% full (112.6 MiB of 1.0 GiB), full in" in out
    assert "nightly: data of the pool is 50% full" in out
    _, out, _ = run("list")
    assert "11% full, full in" in out
    _, out, _ = run("show", IDS[2])
    assert f"capacity    CoW table of {IDS[2]} is 11% full" in out
    del code


def test_status_counts_what_is_too_full_as_a_problem(ctx, storage, run):
    keep_samples(ctx, storage, 0.1, 0.5)
    code, out, _ = run("status")
    assert code == 1
    assert f"CoW table of {IDS[2]} is 50% full (512.0 MiB of 1.0 GiB), full in 1 h 15 min; once it is full, the" in out


def test_status_says_that_the_newest_snapshot_was_lost(ctx, storage, run):
    storage.used[IDS[2]] = None
    settle(ctx)
    code, out, _ = run("status")
    assert code == 1
    assert f"the newest snapshot ({IDS[2]}) is lost: its CoW table overflowed between" in out
