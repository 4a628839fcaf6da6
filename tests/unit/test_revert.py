"""A restore in place is refused for each of its reasons, and ends in one of two states whenever its process dies."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from snapmgr.catalog import Catalog
from snapmgr.config import Config
from snapmgr.errors import BusyError, CommandError, InUseError, SnapmgrError, StorageError
from snapmgr.host import boot_id, machine_id, this_process
from snapmgr.jobs import remount
from snapmgr.jobs import revert as module
from snapmgr.jobs.attach import attach
from snapmgr.jobs.context import Context
from snapmgr.jobs.delete import delete_snapshots, examine
from snapmgr.jobs.diagnosis import diagnose
from snapmgr.jobs.leftovers import look
from snapmgr.jobs.reversion import reversions
from snapmgr.jobs.revert import reversion_leftovers, revert, take_up
from snapmgr.jobs.reverting import plan_revert
from snapmgr.jobs.sweep import sweep
from snapmgr.manifest import Member
from snapmgr.records import Completed, Found, Intent, Mount, Pool, Reason, RevertPlan, SnapshotRef
from support.sample import lease
from support.sample import manifest as sample

pytestmark = pytest.mark.needs("root")

# Any device node whose number is known: nothing is done with it.
_DEVICE, _NUMBER = "/dev/null", "1:3"
_KILLED = 9


class World:
    """A volume, its snapshots and the mount table, all in one file: so they outlive the process that is killed.

    As a backend it is `Revertible`; as a runner it knows mount(8), as a mounter the table.
    """

    name = "fake"

    def __init__(self, folder, *, consumes):
        self.file, self.consumes = folder / "world.json", consumes
        self.plan: dict[str, object] = {}
        self.fails: dict[str, SnapmgrError] = {}
        self.die_at: int | None = None
        self.steps: list[str] = []
        self.data(now="new", snapshots={"n0": "old"}, token=None, merged=False, mounts=[])

    def data(self, **changes):
        data = json.loads(self.file.read_text()) if self.file.exists() else {}
        self.file.write_text(json.dumps(data | changes))
        return data | changes

    def step(self, what):
        if len(self.steps) == self.die_at:
            os._exit(_KILLED)
        self.steps.append(what)
        if what in self.fails:
            raise self.fails[what]

    # The backend.

    def missing(self):
        return ()

    def gauges(self, pools):  # noqa: ARG002
        return ()

    def inventory(self, pools):
        (pool,) = pools
        found = self.data()["snapshots"]
        return tuple(
            Found(kind="snapshot", pool=pool, name=one, snapshot_id=self.entry_id, ref=replace(self.ref, native_id=one))
            for one in found
        )

    def annotate(self, ref, note):  # noqa: ARG002
        self.step("annotate")
        assert ref.native_id in self.data()["snapshots"]

    def revert_plan(self, ref):  # noqa: ARG002
        fields = {"origin": "vg/v", "device": _DEVICE, "number": _NUMBER, "consumes": self.consumes}
        return RevertPlan(**(fields | self.plan))

    def revert_state(self, ref, token):
        data = self.data()
        if ref.native_id in data["snapshots"]:
            if data["token"] != token or not data["merged"]:
                return "none"
            # What the kernel does meanwhile.
            rest = {one: what for one, what in data["snapshots"].items() if one != ref.native_id}
            self.data(now="old", snapshots=rest)
            return "merging"
        return "done"

    def begin_revert(self, ref, token):
        self.step("prepare")
        if self.revert_state(ref, token) == "none":
            assert not self.data()["mounts"], "it is mounted"
            copy = {} if self.consumes else {"copy": "old"}
            self.data(token=token, snapshots=self.data()["snapshots"] | copy)
            self.step("begin")
            self.data(merged=True)

    def cancel_revert(self, ref, token):
        self.step("cancel")
        assert self.revert_state(ref, token) == "none"
        data = self.data()
        self.data(token=None, snapshots={one: what for one, what in data["snapshots"].items() if one != "copy"})

    def finish_revert(self, ref, token):
        self.step("finish")
        assert self.revert_state(ref, token) == "done"
        data = self.data(token=None)
        if self.consumes:
            return None
        self.data(snapshots={"n1": "old"} if "copy" in data["snapshots"] else data["snapshots"])
        return replace(ref, native_id="n1")

    # The mounter and the runner.

    def mounts(self):
        rows = self.data()["mounts"]
        return tuple(Mount(**row | {"options": tuple(row["options"])}) for row in rows)

    def mount(self, point, root="/", number=_NUMBER, parent=1):
        rows = self.data()["mounts"]
        row = {"id": 100 + len(rows), "parent_id": parent, "device": number, "root": root, "point": str(point)}
        self.data(mounts=[*rows, row | {"fs_type": "ext4", "source": _DEVICE, "options": ["rw"]}])

    def unmount(self, point, *, mount_id):
        self.step(f"umount {os.path.basename(point)}")
        self.data(mounts=[row for row in self.data()["mounts"] if row["id"] != mount_id])

    def run(self, argv, **_options):
        assert argv[0] == "mount"
        if "--bind" in argv:
            self.step("bind")
            whole = next(row["point"] for row in self.data()["mounts"] if row["root"] == "/")
            self.mount(argv[-1], root=argv[2].removeprefix(whole))
        elif "remount" not in argv[2]:
            self.step("mount")
            self.mount(argv[-1])
        return Completed(argv=tuple(argv), returncode=0, stdout="", stderr="")


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
    world.entry_id = manifest.id
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
    world.lines = []
    return Context(
        config=config, catalog=catalog, runner=world, mounter=world, tell=world.lines.append, _backends={"fake": world}
    )


def _plan(ctx, **options):
    return plan_revert(ctx, ctx.catalog.load(ctx._backends["fake"].entry_id), **options)


def _points(world):
    return [(mount.point, mount.root) for mount in world.mounts()]


def _refusals(ctx, **options):
    return [str(error) for error in _plan(ctx, **options).obstacles]


def _is_put_back(ctx, world):
    """Whether the data are those of the snapshot, and everything says so; fails if it says something else."""
    manifest = ctx.catalog.load(world.entry_id).manifest
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
    done = revert(ctx, plan)
    assert (done.consumed, done.origins, list(done.mounted)) == (world.consumes, ("vg/v",), [one for one, _ in before])
    assert _is_put_back(ctx, world)
    assert _points(world) == before
    assert reversions(ctx.catalog) == ()
    order = [step.split()[0] for step in world.steps if step != "annotate"]
    assert order == ["umount", "umount", "prepare", "begin", "finish", "mount", "bind"]
    assert not [one for one in diagnose(look(ctx)) if one.level == "problem"]


def test_a_volume_that_is_mounted_nowhere_is_put_back_and_not_mounted(ctx, world):
    world.data(mounts=[])
    plan = _plan(ctx)
    assert plan.origins[0].beside is None
    assert revert(ctx, plan).mounted == ()
    assert _is_put_back(ctx, world)


# ------------------------------------------------------------------------------------------------------------- refused


def test_a_backend_that_cannot_do_it_is_named(ctx, world):
    class Plain:
        def missing(self):
            return ()

    ctx._backends["fake"] = Plain()
    with pytest.raises(StorageError, match="fake cannot put an origin back") as caught:
        plan_revert(ctx, ctx.catalog.load(world.entry_id))
    assert f"snapmgr restore {world.entry_id} DEST" in caught.value.hint


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
        revert(ctx, _plan(ctx))
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
    revert(ctx, _plan(ctx, force=True), force=True)
    assert _is_put_back(ctx, world)


def test_what_means_more_than_was_agreed_to_is_refused(ctx, world, tmp_path):
    plan = _plan(ctx)
    (tmp_path / "volume/third").mkdir()
    with pytest.raises(StorageError, match="has changed just now"):
        revert(ctx, plan)
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
                revert(ctx, plan)
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
        revert(ctx, _plan(ctx))
    assert not _is_put_back(ctx, world)
    assert sorted(_points(world)) == sorted(before)
    assert reversions(ctx.catalog) == ()
    world.fails.clear()
    assert revert(ctx, _plan(ctx)).origins == ("vg/v",)


def test_what_cannot_be_mounted_again_is_said_and_tried_again(ctx, world):
    world.fails["mount"] = CommandError("mount: wrong fs type")
    with pytest.raises(StorageError, match="could not be mounted again: .*wrong fs type") as caught:
        revert(ctx, _plan(ctx))
    assert "doctor --fix" in caught.value.hint
    assert _is_put_back(ctx, world)
    world.fails.clear()
    done = take_up(ctx, world.entry_id)
    assert done is not None
    assert len(_points(world)) == 2
    assert reversions(ctx.catalog) == ()


def test_a_storage_that_gives_up_keeps_the_record(ctx, world, monkeypatch):
    states = iter(["none", "none"])
    monkeypatch.setattr(world, "revert_state", lambda *_: next(states, "failed"))
    with pytest.raises(StorageError, match="gave up in the middle"):
        revert(ctx, _plan(ctx))
    assert [record.step for record in reversions(ctx.catalog)] == ["merging"]


# -------------------------------------------------------------------------------------------------------------- killed


def _killed_at(ctx, world, number):
    """Run it in a child that dies at its step `number`; return whether it came that far."""
    plan = _plan(ctx)
    pid = os.fork()
    if pid == 0:
        world.die_at = number
        try:
            revert(ctx, plan)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == _KILLED


@pytest.mark.parametrize("number", range(9))
def test_killed_at_any_step_it_is_undone_or_completed(ctx, world, number):
    # Each step of each kind, and each way of going on after each step.
    by = "doctor" if (number + world.consumes) % 2 else "restore"
    before = _points(world)
    if not _killed_at(ctx, world, number):
        assert number >= 7 + (not world.consumes)
        return
    assert len(reversions(ctx.catalog)) == 1
    for forbidden in (
        lambda: sweep(ctx, "nightly"),
        lambda: delete_snapshots(ctx, examine(ctx, [world.entry_id]), force=True),
    ):
        with pytest.raises(BusyError, match="was cut short") as caught:
            forbidden()
        assert f"snapmgr restore {world.entry_id} --in-place" in caught.value.hint
    if ctx.catalog.load(world.entry_id).manifest.state == "ready":
        with pytest.raises(BusyError, match="was cut short"):
            attach(ctx, ctx.catalog.load(world.entry_id), writable=False, why="mount")
    problems = [one for one in diagnose(look(ctx)) if one.level == "problem"]
    assert [(one.subject, one.job) for one in problems] == [("vg/v", "nightly")]
    if by == "doctor":
        (leftover,) = reversion_leftovers(ctx)
        assert not leftover.active
        said = leftover.remove()
        assert ("is undone" in said) != _is_put_back(ctx, world)
        assert ("is completed" in said) == _is_put_back(ctx, world)
    else:
        assert (take_up(ctx, world.entry_id) is not None) == _is_put_back(ctx, world)
    assert sorted(_points(world)) == sorted(before)
    assert reversions(ctx.catalog) == ()
    assert world.data()["token"] is None
    assert not [one for one in diagnose(look(ctx)) if one.level == "problem"]


def test_one_that_is_under_way_is_left_alone(ctx, world):
    _killed_at(ctx, world, 3)
    (record,) = reversions(ctx.catalog)
    path = ctx.catalog.path / "reversions" / f"{record.token}.json"
    document = json.loads(path.read_text())
    holder = this_process()
    document["holder"] = {"pid": holder.pid, "start_ticks": holder.start_ticks, "boot_id": boot_id()}
    path.write_text(json.dumps(document))
    path.chmod(0o600)
    (leftover,) = reversion_leftovers(ctx)
    assert leftover.active
    assert not [one for one in diagnose(look(ctx)) if one.cure is not None]
    with pytest.raises(BusyError, match=f"is being put back in place to {world.entry_id}"):
        sweep(ctx, "nightly")


def test_a_record_that_cannot_be_read_stops_everything(ctx, world):
    _killed_at(ctx, world, 3)
    (record,) = reversions(ctx.catalog)
    path = ctx.catalog.path / "reversions" / f"{record.token}.json"
    path.write_text("{}")
    with pytest.raises(SnapmgrError, match="is damaged"):
        sweep(ctx, "nightly")
    assert record.began_at <= datetime.now(UTC)


def test_a_state_directory_on_the_volume_would_go_back_too(ctx, world):
    device = os.stat(ctx.config.state_dir).st_dev
    world.plan = {"number": f"{os.major(device)}:{os.minor(device)}"}
    assert any("the state directory" in one for one in _refusals(ctx))
