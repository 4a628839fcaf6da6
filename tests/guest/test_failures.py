"""What people, other programs and full storage do to LVM's snapshots: nothing is lost silently, nothing hangs."""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.backup import run as backup_job
from snapmgr_lvm import report
from support import lvm
from support.lvm import run
from support.volumescene import volume_scene

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.lvm import VolumeGroup
    from support.volumescene import VolumeScene

pytestmark = pytest.mark.needs("root")

# For some commands together, on a machine that has other things to do.
_BOUND_S = 120.0
_VERIFY = 'verify.command = ["grep", "-q", "data", "{}/file"]'


def _only(scene: VolumeScene) -> str:
    """Return the logical volume of the only snapshot, as LVM names it: "vg/lv"."""
    (entry,) = scene.entries()
    return f"{scene.origin.vg}/{entry.manifest.members[0].ref.name}"


def _take(scene: VolumeScene) -> str:
    """Take a snapshot and return its id."""
    scene.ok("backup", "demo")
    return scene.entries()[-1].manifest.id


def _reads(scene: VolumeScene, snapshot_id: str) -> None:
    """A snapshot can be mounted, and holds what it should."""
    mount = json.loads(scene.ok("mount", snapshot_id, "--json"))["mount"]
    assert Path(mount["data_path"], "file").read_text() == "data"
    scene.ok("umount", mount["point"])


def test_names_that_are_taken_or_reserved(vg: VolumeGroup) -> None:
    with volume_scene(vg, "classic") as scene:
        text = scene.config_file.read_text()
        for job in ("a_tmeta-b", "x" * 35 + "-y-z-w-v-u"):
            scene.config_file.write_text(text.replace("[job.demo]", f"[job.{job}]"))
            scene.ok("backup", job)
        _reads(scene, f"{job}@latest")
        scene.config_file.write_text(text)
        # Somebody has the very name that the next one would get.
        foreign = "demo.20260101T000000Z.00000000"
        run("lvcreate", "--yes", "--size", "4m", "--name", f"snapmgr.{foreign}", vg.name)

        def take_that() -> None:
            vars(backup_job)["new_id"] = lambda _job, _now: foreign

        refused = scene.call("backup", "demo", first=take_that)
        assert refused.returncode == 1
        assert f"there is a logical volume {vg.name}/snapmgr.{foreign} already" in refused.stderr
        assert f"snapmgr.{foreign}" in vg.names()
        assert scene.states() == ["ready"] * 2


def test_what_people_do_to_a_snapshot_by_hand(vg: VolumeGroup) -> None:
    """Renaming and activating do no harm; a group has its name from its UUID; writing to it is told."""
    with volume_scene(vg, "thin", job=_VERIFY) as scene:
        first = _take(scene)
        run("lvchange", "--yes", "--setactivationskip", "n", _only(scene))
        run("lvchange", "--yes", "--activate", "y", _only(scene))
        run("lvrename", _only(scene), f"{vg.name}/other-name")
        run("lvrename", f"{vg.name}/{scene.origin.lv}", f"{vg.name}/other-origin")
        run("vgrename", vg.name, "vg-renamed")
        try:
            scene.ok("verify", first)
            _reads(scene, first)
            second = _take(scene)
            assert "none is missing" in scene.ok("doctor")
            scene.ok("delete", "--force", "--yes", first)
            assert scene.ours() == [f"snapmgr.{second}"]
        finally:
            run("vgrename", "vg-renamed", vg.name)
            run("lvrename", f"{vg.name}/other-origin", f"{vg.name}/{scene.origin.lv}")
        name = _only(scene)
        run("lvchange", "--yes", "--permission", "rw", name)
        for command, code in (("mount", 1), ("verify", 6)):
            refused = scene.call(command, second)
            assert refused.returncode == code, refused
            assert "was made writable by hand" in refused.stderr
        told = scene.call("doctor")
        assert told.returncode == 1
        assert "it was made writable by hand, and is not to be trusted" in told.stdout
        assert scene.call("doctor", "--fix").returncode == 1
        assert scene.ours() == [name.partition("/")[2]]
        run("lvchange", "--yes", "--permission", "r", name)
        # Its note is damaged: nobody needs it while the state directory is there.
        (tags,) = (row["lv_tags"] for row in lvm.report("lvs", "-o", "lv_tags", name))
        note = next(tag for tag in tags.split(",") if tag.startswith("snapmgr.note."))
        run("lvchange", "--yes", "--deltag", note, "--addtag", f"{note[:40]}AAAA", name)
        _reads(scene, second)
        scene.ok("doctor")
        scene.ok("delete", "--force", "--yes", second)
        assert scene.ours() == []


def test_a_foreign_volume_in_its_place_is_left_alone(vg: VolumeGroup) -> None:
    """Under its name, and with a copy of its tags, too."""
    with volume_scene(vg, "classic", job=_VERIFY) as scene:
        for copied in (False, True):
            snapshot_id = _take(scene)
            name = _only(scene)
            (tags,) = (row["lv_tags"] for row in lvm.report("lvs", "-o", "lv_tags", name))
            run("lvremove", "--yes", name)
            added = [word for tag in tags.split(",") if copied for word in ("--addtag", tag)]
            run("lvcreate", "--yes", "--size", "4m", *added, "--name", name.partition("/")[2], vg.name)
            assert scene.call("mount", snapshot_id).returncode == 1
            assert scene.call("verify", snapshot_id).returncode == 6
            told = scene.call("doctor")
            assert (told.returncode, f"the storage of {snapshot_id} is gone" in told.stdout) == (1, True), told
            scene.call("doctor", "--fix")
            assert scene.states() == ["broken"]
            # Nor by whoever deletes what is left, or takes another one.
            scene.ok("delete", "--force", "--yes", snapshot_id)
            scene.ok("backup", "demo")
            assert name.partition("/")[2] in scene.ours()
            run("lvremove", "--yes", name)
            scene.ok("delete", "--force", "--yes", *(entry.manifest.id for entry in scene.entries()))


def test_the_origin_is_removed(vg: VolumeGroup) -> None:
    """Thin snapshots stay and restore; classic ones go with it, and that is said."""
    with volume_scene(vg, "thin", job=_VERIFY) as thin, volume_scene(vg, "classic") as classic:
        ids = {scene: _take(scene) for scene in (thin, classic)}
        for scene in (thin, classic):
            run("umount", scene.origin.point)
            run("lvremove", "--yes", f"{vg.name}/{scene.origin.lv}")
        thin.ok("verify", ids[thin])
        _reads(thin, ids[thin])
        thin.ok("restore", ids[thin], str(thin.folder / "restored"))
        assert (thin.folder / "restored" / "file").read_text() == "data"
        assert "ready" in classic.ok("list")
        told = classic.call("doctor")
        assert f"the storage of {ids[classic]} is gone" in told.stdout, told
        refused = classic.call("mount", ids[classic])
        assert refused.returncode == 1
        assert "is not in the volume group" in refused.stderr
        classic.call("doctor", "--fix")
        assert classic.states() == ["broken"]
        thin.ok("delete", "--force", "--yes", ids[thin])
        assert thin.ours() == []


def test_a_snapshot_that_somebody_uses_is_kept_and_pruning_goes_on(vg: VolumeGroup) -> None:
    with volume_scene(vg, "classic", job="retention.keep-last = 1") as scene:
        ids = [_take(scene) for _ in range(3)]
        device = vg.device(f"snapmgr.{ids[0]}")
        fd = os.open(device, os.O_RDONLY)
        try:
            pruned = scene.call("prune")
            assert pruned.returncode == 0, pruned
            assert f"keeping {ids[0]}: the logical volume" in pruned.stderr
            refused = scene.call("delete", "--yes", ids[0])
            assert refused.returncode == 1
            assert "is open: mounted, or below another device" in refused.stderr
            assert scene.ours() == [f"snapmgr.{one}" for one in (ids[0], ids[2])]
            assert scene.states() == ["ready", "ready"]
        finally:
            os.close(fd)
        scene.ok("prune")
        assert scene.ours() == [f"snapmgr.{ids[2]}"]


@contextmanager
def _no_space_timeout(seconds: int) -> Iterator[None]:
    parameter = Path("/sys/module/dm_thin_pool/parameters/no_space_timeout")
    usual = parameter.read_text()
    parameter.write_text(str(seconds))
    try:
        yield
    finally:
        parameter.write_text(usual)


def test_a_thin_pool_runs_full(vg: VolumeGroup) -> None:
    vg.pool(data_mib=96, metadata_mib=4)
    with volume_scene(vg, "thin") as scene, _no_space_timeout(4):
        first = _take(scene)
        text = scene.config_file.read_text()
        with (scene.data / "big").open("wb", buffering=0) as file:
            file.writelines([bytes(1 << 20)] * 20)
            os.fsync(file.fileno())
        scene.config_file.write_text(text.replace("[backend.lvm]", '[backend.lvm]\npool_data_limit = "50%"'))
        refused = scene.call("backup", "demo")
        assert refused.returncode == 1
        assert "% full in the thin pool" in refused.stderr
        assert f"lvextend --size +50331648b {vg.name}/pool" in refused.stderr
        scene.config_file.write_text(text)
        with (scene.data / "big").open("wb", buffering=0) as file:
            file.writelines([bytes(1 << 20)] * 60)
            # It stalls, and fails.
            with pytest.raises(OSError, match="No space left|error"):
                os.fsync(file.fileno())
        start = time.monotonic()
        refused = scene.call("backup", "demo")
        assert refused.returncode == 1, refused
        assert f"data of the thin pool {vg.name}/pool has 0 B of 96.0 MiB free" in refused.stderr
        scene.config_file.write_text(text.replace("[job.demo]", '[job.demo]\nfree_min = "0"'))
        refused = scene.call("backup", "demo")
        assert f"the thin pool {vg.name}/pool is damaged or full: out_of_data" in refused.stderr
        scene.config_file.write_text(text)
        assert scene.call("doctor").returncode == 1
        # Its clone cannot be written, not even its journal replayed.
        lost = scene.call("mount", first)
        assert lost.returncode == 1, lost
        scene.ok("delete", "--force", "--yes", first)
        assert scene.ours() == []
        assert time.monotonic() - start < _BOUND_S
        run("lvextend", "--yes", "--size", "+96m", f"{vg.name}/pool")
        # XFS gave up.
        run("umount", scene.origin.point)
        run("mount", scene.origin.device, scene.origin.point)
        _reads(scene, _take(scene))


def test_nothing_hangs_for_ever_while_another_command_has_the_lock(vg: VolumeGroup) -> None:
    def be_impatient() -> None:
        report.READ_TIMEOUT_S = 1.0

    with volume_scene(vg, "classic") as scene:
        first = _take(scene)
        with open(f"/run/lock/lvm/V_{vg.name}", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for arguments in (("backup", "demo"), ("mount", first), ("doctor",)):
                done = scene.call(*arguments, first=be_impatient)
                assert done.returncode == 1, done
                assert f"(pid {os.getpid()}) holds the lock of {vg.name}" in done.stdout + done.stderr, done
        # The mount could not clear up after itself.
        scene.ok("doctor", "--fix")
        _reads(scene, first)


def test_two_commands_at_once_in_one_volume_group(vg: VolumeGroup) -> None:
    job = f"retention.keep-last = 1\n{_VERIFY}"
    with volume_scene(vg, "thin", job=job) as thin, volume_scene(vg, "classic", job=job) as classic:
        for scene in (thin, classic):
            _take(scene)
        both = [scene.begin("backup", "demo") for scene in (thin, classic)]
        assert [one.end().returncode for one in both] == [0, 0]
        running = [thin.begin("verify", thin.entries()[-1].manifest.id), classic.begin("prune"), thin.begin("prune")]
        for done in (one.end() for one in running):
            assert done.returncode == 0, done
        assert (len(thin.entries()), len(classic.entries())) == (1, 1)
        for scene in (thin, classic):
            scene.ok("doctor")
        assert len(thin.ours()) == 2


def test_no_room_in_the_volume_group_or_its_metadata(disk: str) -> None:
    with lvm.partitions(disk, 4) as parts:
        run("pvcreate", "--yes", "--metadatasize", "256k", parts[0])
        with lvm.volume_group(parts[:1], name="vg-small") as vg, volume_scene(vg, "classic") as scene:
            run("lvcreate", "--yes", "--extents", "100%FREE", "--name", "all", vg.name)
            refused = scene.call("backup", "demo")
            assert refused.returncode == 1
            assert "the volume group vg-small has 0 B of 2.0 GiB free, of which the backup takes" in refused.stderr
            run("lvremove", "--yes", f"{vg.name}/all")
            run("lvcreate", "--yes", "--size", "4m", "--name", "tagged", vg.name)
            number = 0
            while int(lvm.report("vgs", "-o", "vg_mda_free", vg.name)[0]["vg_mda_free"]) >= 64 << 10:
                tags = [word for each in range(8) for word in ("--addtag", f"{number}.{each}." + "x" * 1000)]
                run("lvchange", "--yes", *tags, f"{vg.name}/tagged")
                number += 1
            refused = scene.call("backup", "demo")
            assert refused.returncode == 1
            assert "the metadata area of the volume group vg-small is nearly full" in refused.stderr


def test_a_group_that_has_lost_a_disk_or_is_exported(disk: str) -> None:
    """No snapshot of it is made; what there is stays usable, or is said to be out of reach, and never to be gone."""
    with ExitStack() as stack:
        parts = stack.enter_context(lvm.partitions(disk, 2))
        vg = stack.enter_context(lvm.volume_group(parts, name="vg-two"))
        scene = stack.enter_context(volume_scene(vg, "classic"))
        ids = [_take(scene) for _ in range(2)]
        run("lvcreate", "--yes", "--size", "4m", "--name", "elsewhere", vg.name, parts[1])
        run("lvchange", "--activate", "n", f"{vg.name}/elsewhere")
        place = Path("/sys/class/block", Path(parts[1]).name)
        start, size = ((place / name).read_text().strip() for name in ("start", "size"))
        run("delpart", disk, "2")
        try:
            refused = scene.call("backup", "demo")
            assert refused.returncode == 1
            assert "the volume group vg-two misses 1 of its physical volumes" in refused.stderr
            _reads(scene, ids[0])
            scene.ok("delete", "--force", "--yes", ids[0])
        finally:
            run("addpart", disk, "2", start, size)
        run("vgextend", "--restoremissing", vg.name, parts[1])
        run("umount", scene.origin.point)
        run("vgchange", "--activate", "n", vg.name)
        run("vgexport", vg.name)
        for arguments in (("mount", ids[1]), ("doctor",), ("delete", "--force", "--yes", ids[1])):
            refused = scene.call(*arguments)
            assert refused.returncode == 1, refused
            assert "exported" in refused.stdout + refused.stderr, refused
        assert scene.states() == ["ready"]
        run("vgimport", vg.name)
        run("vgchange", "--activate", "y", vg.name)
        run("mount", scene.origin.device, scene.origin.point)
        _reads(scene, ids[1])
        _take(scene)
        # The mount that failed could not be cleared up while LVM did not look at the group.
        scene.ok("doctor", "--fix")
        scene.ok("doctor")


def test_a_volume_on_luks_on_raid_on_partitions_is_like_any_other(disk: str) -> None:
    with ExitStack() as stack:
        parts = stack.enter_context(lvm.partitions(disk, 2))
        opened = stack.enter_context(lvm.luks(stack.enter_context(lvm.mirror(parts))))
        vg = stack.enter_context(lvm.volume_group([opened], name="vg-stacked"))
        for kind in ("thin", "classic"):
            scene = stack.enter_context(volume_scene(vg, kind, job=_VERIFY))
            snapshot_id = _take(scene)
            scene.ok("verify", snapshot_id)
            _reads(scene, snapshot_id)
            scene.ok("delete", "--force", "--yes", snapshot_id)
