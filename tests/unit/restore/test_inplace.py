"""An in-place restore is refused for each obstacle, and ends in one of two states whenever its process dies."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from snapmgr.access.attach import attach
from snapmgr.backup.sweep import sweep
from snapmgr.catalog.inplace import inplace_records
from snapmgr.catalog.manifest import Member
from snapmgr.catalog.store import Catalog
from snapmgr.config.model import Config
from snapmgr.context import Context
from snapmgr.contract.errors import BusyError, CommandError, InUseError, SnapmgrError, StorageError
from snapmgr.contract.records import Intent, Pool, Reason, SnapshotRef
from snapmgr.doctor.collect import collect_facts
from snapmgr.doctor.diagnose import diagnose
from snapmgr.keep.delete import delete_snapshots, examine
from snapmgr.restore.inplace import remount
from snapmgr.restore.inplace import run as module
from snapmgr.restore.inplace.plan import plan_inplace
from snapmgr.restore.inplace.run import restore_inplace, resume_inplace, unfinished_inplace
from snapmgr.system.boot import boot_id, machine_id
from snapmgr.system.host import this_process
from support.revertible import KILLED, World
from support.sample import lease
from support.sample import manifest as sample

pytestmark = pytest.mark.needs("root")


@pytest.fixture(name="world", params=[True, False], ids=["classic", "thin"])
def _world(request, tmp_path, monkeypatch):
    world = World(tmp_path, consumes=request.param)
    pool = Pool(backend="fake", id="vg", hint="vg")
    volume, point = tmp_path / "volume", tmp_path / "bound"
    for folder in (volume / "data", volume / "other", point):
        folder.mkdir(parents=True)
    manifest = sample(machine_id=machine_id(), path=str(volume / "data"), source="directory", quiesce=None, server=None)
    world.ref = SnapshotRef(
        backend="fake", snapshot_id=manifest.id, pool=pool, volume_id="v", name="n0", native_id="n0"
    )
    member = Member(ref=world.ref, subpath="data", call_s=0.0, path=str(volume), places={manifest.path: "data"})
    intent = Intent(pool=pool, volume_id="v", name="n0")
    world.manifest = replace(manifest, members=(member,), intents=(intent,))
    world.mount(volume)
    world.mount(point, root="/data")
    monkeypatch.setattr(remount, "unmount", world.unmount)
    monkeypatch.setattr(module, "_POLL_S", 0.01)
    return world


@pytest.fixture(name="ctx")
def _ctx(world, tmp_path):
    catalog = Catalog(tmp_path / "state")
    catalog.make()
    catalog.write(world.manifest)
    config = Config(state_dir=tmp_path / "state", scratch_dir=tmp_path / "scratch", jobs={}, backends={}, files=())
    return Context(
        config=config, catalog=catalog, runner=world, mounter=world, tell=world.lines.append, _backends={"fake": world}
    )


def _plan(ctx, **options):
    return plan_inplace(ctx, ctx.catalog.load(ctx._backends["fake"].manifest.id), **options)


def _points(world):
    return [(mount.point, mount.root) for mount in world.mounts()]


def _refusals(ctx, **options):
    return [str(error) for error in _plan(ctx, **options).obstacles]


def _is_put_back(ctx, world):
    """Whether the data are those of the snapshot, and everything says so; fails if it says something else."""
    manifest = ctx.catalog.load(world.manifest.id).manifest
    data = world.data()
    if data["now"] == "new":
        assert (manifest.state, data["snapshots"]) == ("ready", {"n0": "old"})
        return False
    if world.consumes:
        assert (manifest.state, data["snapshots"]) == ("broken", {})
        assert manifest.reason.startswith("merged into its origin at ")
    else:
        assert (manifest.state, data["snapshots"]) == ("ready", {"n1": "old"})
        assert manifest.members[0].ref.native_id == "n1"
    return True


# ---------------------------------------------------------------------------------------------------------- to its end


def test_the_volume_is_unmounted_put_back_and_mounted_as_it_was(ctx, world):
    before = _points(world)
    plan = _plan(ctx)
    assert plan.obstacles == ()
    assert plan.origins[0].beside == ("other",)
    assert plan.rules == (("newest READY",) if world.consumes else ())
    done = restore_inplace(ctx, plan)
    assert (done.consumed, done.origins, list(done.mounted)) == (world.consumes, ("vg/v",), [one for one, _ in before])
    assert _is_put_back(ctx, world)
    assert _points(world) == before
    assert inplace_records(ctx.catalog) == ()
    order = [step.split()[0] for step in world.steps if step != "annotate"]
    assert order == ["umount", "umount", "prepare", "begin", "finish", "mount", "bind"]
    assert not [one for one in diagnose(collect_facts(ctx)) if one.level == "problem"]


def test_a_volume_that_is_mounted_nowhere_is_put_back_and_not_mounted(ctx, world):
    world.data(mounts=[])
    plan = _plan(ctx)
    assert plan.origins[0].beside is None
    assert restore_inplace(ctx, plan).mounted == ()
    assert _is_put_back(ctx, world)


# ------------------------------------------------------------------------------------------------------------- refused


def test_a_backend_that_cannot_do_it_is_named(ctx, world):
    class Plain:
        def missing(self):
            return ()

    ctx._backends["fake"] = Plain()
    with pytest.raises(StorageError, match="fake cannot restore an origin in place") as caught:
        plan_inplace(ctx, ctx.catalog.load(world.manifest.id))
    assert f"snapmgr restore {world.manifest.id} DEST" in caught.value.hint


@pytest.mark.parametrize("state", ["pending", "deleting", "broken"])
def test_only_a_ready_snapshot_is_put_back(ctx, world, state):
    ctx.catalog.write(world.manifest.with_state(state))
    with pytest.raises(StorageError, match="cannot be restored in place"):
        _plan(ctx)


def test_each_obstacle_is_named(ctx, world, tmp_path):
    ctx.catalog.write(replace(world.manifest, machine_id="another"))
    ctx.catalog.write_lease(lease(world.manifest))
    world.plan = {"blocked": (Reason(what="it is suspended", hint="resume it"),)}
    world.mount(tmp_path / "volume/sub", number="9:9", parent=100)
    found = _refusals(ctx)
    assert len(found) == 4
    for text in ("was taken on another machine", "is attached at ", "it is suspended", f"{tmp_path}/volume/sub"):
        assert any(text in one for one in found), text
    with pytest.raises(StorageError, match="another machine"):
        restore_inplace(ctx, _plan(ctx))
    assert world.steps == []


def test_a_lease_of_a_sibling_is_in_the_way_only_of_what_writes_to_it(ctx, world):
    sibling = replace(
        sample(1, machine_id=machine_id()), members=(replace(world.manifest.members[0], ref=replace(world.ref)),)
    )
    ref = replace(world.ref, snapshot_id=sibling.id, native_id="n9")
    sibling = replace(sibling, members=(replace(sibling.members[0], ref=ref),))
    ctx.catalog.write(sibling)
    ctx.catalog.write_lease(lease(sibling))
    assert bool(_refusals(ctx)) == world.consumes


def test_other_snapshots_are_lost_only_by_force(ctx, world):
    world.plan = {"loses": (Reason(what="vg/other may need 2 GiB", hint="lvextend"),)}
    assert _refusals(ctx) == ["vg/other may need 2 GiB"]
    assert "--force" in _plan(ctx).obstacles[0].hint
    restore_inplace(ctx, _plan(ctx, force=True), force=True)
    assert _is_put_back(ctx, world)


def test_what_means_more_than_was_agreed_to_is_refused(ctx, world, tmp_path):
    plan = _plan(ctx)
    (tmp_path / "volume/third").mkdir()
    with pytest.raises(StorageError, match="have changed since they were shown"):
        restore_inplace(ctx, plan)
    assert not _is_put_back(ctx, world)


def test_an_active_run_of_any_job_of_the_volume_is_in_the_way(ctx, world):
    other = sample(1, job="hourly")
    ctx.catalog.write(replace(other, members=(replace(world.manifest.members[0]),)))
    plan = _plan(ctx)
    assert plan.jobs == ("nightly", "hourly")
    pid = os.fork()
    if pid == 0:
        with ctx.catalog.job_lock("hourly"):
            code = 0
            try:
                restore_inplace(ctx, plan)
            except BusyError:
                code = 5
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    assert world.steps == []


# -------------------------------------------------------------------------------------------------------------- failed


@pytest.mark.parametrize("step", ["umount volume", "umount bound", "prepare", "begin"])
def test_what_fails_before_the_storage_has_begun_leaves_all_as_it_was(ctx, world, step):
    before = _points(world)
    world.fails[step] = InUseError("it is in use by sleep (pid 7)")
    with pytest.raises(InUseError, match="sleep"):
        restore_inplace(ctx, _plan(ctx))
    assert not _is_put_back(ctx, world)
    assert sorted(_points(world)) == sorted(before)
    assert inplace_records(ctx.catalog) == ()
    world.fails.clear()
    assert restore_inplace(ctx, _plan(ctx)).origins == ("vg/v",)


def test_what_cannot_be_mounted_again_is_said_and_tried_again(ctx, world):
    world.fails["mount"] = CommandError("mount: wrong fs type")
    with pytest.raises(StorageError, match="could not be mounted again: .*wrong fs type") as caught:
        restore_inplace(ctx, _plan(ctx))
    assert "doctor --fix" in caught.value.hint
    assert _is_put_back(ctx, world)
    world.fails.clear()
    done = resume_inplace(ctx, world.manifest.id)
    assert done is not None
    assert len(_points(world)) == 2
    assert inplace_records(ctx.catalog) == ()


def test_a_storage_that_gives_up_keeps_the_record(ctx, world, monkeypatch):
    states = iter(["none", "none"])
    monkeypatch.setattr(world, "revert_state", lambda *_: next(states, "failed"))
    with pytest.raises(StorageError, match="stopped before the end"):
        restore_inplace(ctx, _plan(ctx))
    assert [record.step for record in inplace_records(ctx.catalog)] == ["merging"]


# -------------------------------------------------------------------------------------------------------------- killed


def _killed_at(ctx, world, number):
    """Run it in a child that dies at its step `number`; return whether it came that far."""
    plan = _plan(ctx)
    pid = os.fork()
    if pid == 0:
        world.die_at = number
        try:
            restore_inplace(ctx, plan)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == KILLED


@pytest.mark.parametrize("number", range(9))
def test_killed_at_any_step_it_is_undone_or_completed(ctx, world, number):
    # Each step of each kind, and each way of going on after each step.
    by = "doctor" if (number + world.consumes) % 2 else "restore"
    before = _points(world)
    if not _killed_at(ctx, world, number):
        assert number >= 7 + (not world.consumes)
        return
    assert len(inplace_records(ctx.catalog)) == 1
    for forbidden in (
        lambda: sweep(ctx, "nightly"),
        lambda: delete_snapshots(ctx, examine(ctx, [world.manifest.id]), force=True),
    ):
        with pytest.raises(BusyError, match="is unfinished") as caught:
            forbidden()
        assert f"snapmgr restore {world.manifest.id} --in-place" in caught.value.hint
    if ctx.catalog.load(world.manifest.id).manifest.state == "ready":
        with pytest.raises(BusyError, match="is unfinished"):
            attach(ctx, ctx.catalog.load(world.manifest.id), writable=False, why="mount")
    problems = [one for one in diagnose(collect_facts(ctx)) if one.level == "problem"]
    assert [(one.subject, one.job) for one in problems] == [("vg/v", "nightly")]
    if by == "doctor":
        (leftover,) = unfinished_inplace(ctx)
        assert not leftover.active
        said = leftover.resolve()
        assert ("is undone" in said) != _is_put_back(ctx, world)
        assert ("is completed" in said) == _is_put_back(ctx, world)
    else:
        assert (resume_inplace(ctx, world.manifest.id) is not None) == _is_put_back(ctx, world)
    assert sorted(_points(world)) == sorted(before)
    assert inplace_records(ctx.catalog) == ()
    assert world.data()["token"] is None
    assert not [one for one in diagnose(collect_facts(ctx)) if one.level == "problem"]


def test_one_that_is_under_way_is_left_alone(ctx, world):
    _killed_at(ctx, world, 3)
    (record,) = inplace_records(ctx.catalog)
    path = ctx.catalog.path / "inplace" / f"{record.token}.json"
    document = json.loads(path.read_text())
    holder = this_process()
    document["holder"] = {"pid": holder.pid, "start_ticks": holder.start_ticks, "boot_id": boot_id()}
    path.write_text(json.dumps(document))
    path.chmod(0o600)
    (leftover,) = unfinished_inplace(ctx)
    assert leftover.active
    assert not [one for one in diagnose(collect_facts(ctx)) if one.repair is not None]
    with pytest.raises(BusyError, match=f"from {world.manifest.id} is running"):
        sweep(ctx, "nightly")


def test_a_record_that_cannot_be_read_stops_everything(ctx, world):
    _killed_at(ctx, world, 3)
    (record,) = inplace_records(ctx.catalog)
    path = ctx.catalog.path / "inplace" / f"{record.token}.json"
    path.write_text("{}")
    with pytest.raises(SnapmgrError, match="is damaged"):
        sweep(ctx, "nightly")
    assert record.began_at <= datetime.now(UTC)


def test_a_state_directory_on_the_volume_would_go_back_too(ctx, world):
    device = os.stat(ctx.config.state_dir).st_dev
    world.plan = {"number": f"{os.major(device)}:{os.minor(device)}"}
    assert any("the state directory" in one for one in _refusals(ctx))
