"""What is done in guests of their own, each a boot: before and after a reboot, and with udevd.

Run in the guest: ``PYTHONPATH=tests python -m support.boots NAME FOLDER``, with FOLDER kept from boot to boot.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from support import lvm
from support.lvm import run
from support.volumescene import VolumeScene

if TYPE_CHECKING:
    from collections.abc import Callable

_VG = "vgboot"
_KINDS = ("thin", "classic")
_STATE = Path("/mnt/state")
_JOB = """
[job.{kind}]
backend = "lvm"
source = "directory"
path = "/mnt/{kind}/data"
verify.command = ["grep", "-q", "data", "{{}}/file"]
retention.keep-last = 1
capacity_warn_within = "0"
"""


def _mount(lv: str) -> None:
    point = Path("/mnt", lv)
    point.mkdir(exist_ok=True)
    run("mount", f"/dev/{_VG}/{lv}", point)


def _scene(folder: Path, kind: str) -> VolumeScene:
    origin = lvm.Origin(vg=_VG, lv=kind, device=f"/dev/{_VG}/{kind}", point=Path("/mnt", kind), fs_type="")
    scene = VolumeScene(folder, origin)
    scene.state, scene.scratch = _STATE / "snapmgr", Path("/run/snapmgr-scratch")
    return scene


def _make(folder: Path) -> dict[str, VolumeScene]:
    """Make a thin volume with XFS, one with ext4, and one for the state directory and scratch files; a job for each."""
    run("vgcreate", "--yes", _VG, lvm.scratch_disk())
    run("lvcreate", "--yes", "--type", "thin-pool", "--size", "600m", "--name", "pool", _VG)
    run("lvcreate", "--yes", "--type", "thin", "--virtualsize", "320m", "--thinpool", "pool", "--name", "thin", _VG)
    for lv, size in (("classic", "64m"), ("state", "128m")):
        run("lvcreate", "--yes", "--size", size, "--name", lv, _VG)
        run("mkfs.ext4", "-q", f"/dev/{_VG}/{lv}")
    run("mkfs.xfs", "-q", f"/dev/{_VG}/thin")
    for lv in (*_KINDS, "state"):
        _mount(lv)
    scenes = {kind: _scene(folder, kind) for kind in _KINDS}
    for scene in scenes.values():
        scene.data.mkdir()
        (scene.data / "file").write_text("data")
    (_STATE / "cow").mkdir(mode=0o700)
    scenes["thin"].configure(
        text=f'[backend.lvm]\ncow_size = "50%"\nscratch_dir = "{_STATE}/cow"\n'
        + "".join(_JOB.format(kind=kind) for kind in _KINDS)
    )
    return scenes


def _attachments() -> list[tuple[str, str]]:
    """Return (name, "active" or "") of the clones of thin snapshots."""
    rows = lvm.report("lvs", "-o", "lv_name,lv_active", _VG)
    return [(row["lv_name"], row["lv_active"]) for row in rows if ".attachment." in row["lv_name"]]


def before_reboot(folder: Path) -> None:
    """Leave snapshots attached, one of each kind, and a backup that was cut short."""
    scenes = _make(folder)
    for kind, scene in scenes.items():
        scene.ok("backup", kind)
        mount = json.loads(scene.ok("mount", f"{kind}@latest", "--json"))["mount"]
        Path(mount["data_path"], "file").write_text("changed")
    assert [active for _, active in _attachments()] == ["active"]
    assert len(list((_STATE / "cow").glob("*.cow"))) == 1


def after_reboot(folder: Path) -> None:
    """Nothing of it is in the way, and all of it goes."""
    run("vgchange", "--activate", "y", _VG)
    for lv in (*_KINDS, "state"):
        _mount(lv)
    scenes = {kind: _scene(folder, kind) for kind in _KINDS}
    # Activation skip: nobody takes its file system for the origin's.
    assert [active for _, active in _attachments()] == [""]
    assert scenes["thin"].ok("list").count("ready") == 2
    assert scenes["thin"].call("doctor").returncode == 1
    # One is undone by its name, the other one by doctor.
    scenes["thin"].ok("umount", scenes["thin"].entries()[-1].manifest.id)
    fixed = scenes["thin"].call("doctor", "--fix")
    assert fixed.returncode == 0, fixed
    assert (_attachments(), list((_STATE / "cow").iterdir())) == ([], [])
    for kind, scene in scenes.items():
        scene.ok("backup", kind)
        scene.ok("verify", f"{kind}@latest")
        scene.ok("prune", kind)
    scenes["thin"].ok("doctor")
    assert scenes["thin"].ok("mount", "--list", "--json") != ""


def _round(scenes: dict[str, VolumeScene]) -> None:
    """All that is done every day, with what is there and with a new snapshot."""
    for kind, scene in scenes.items():
        scene.ok("verify", f"{kind}@latest")
        mount = json.loads(scene.ok("mount", f"{kind}@latest", "--json"))["mount"]
        assert Path(mount["data_path"], "file").read_text() == "data"
        scene.ok("umount", mount["point"])
        scene.ok("backup", kind)
        scene.ok("prune", kind)
        scene.ok("doctor")
    # Of each the newest, and the newest VERIFIED.
    assert len(scenes["thin"].ours()) == 2 * len(_KINDS)


def with_udevd(folder: Path) -> None:
    """A day with udevd, which looks at all new devices: the file system's UUID leads to the origin.

    But for a clone of a thin snapshot while it is there: an fstab with the UUID is warned of for that.
    """
    scenes = _make(folder)
    for kind, scene in scenes.items():
        device = f"/dev/{_VG}/{kind}"
        uuid = run("blkid", "-p", "-s", "UUID", "-o", "value", device).strip()
        run("udevadm", "trigger", "--action=change", "--settle", os.path.realpath(device))

        def leads(uuid: str = uuid, device: str = device) -> bool:
            run("udevadm", "settle", "--timeout=30")
            return os.path.realpath(f"/dev/disk/by-uuid/{uuid}") == os.path.realpath(device)

        assert leads()
        scene.ok("backup", kind)
        assert leads(), kind
        scene.ok("mount", f"{kind}@latest")
        assert leads() or kind == "thin", kind
        scene.ok("umount", scene.entries()[-1].manifest.id)
        assert leads(), kind
    assert list(Path("/dev/mapper").glob("*attachment*")) == []
    _round(scenes)


_NAMED: dict[str, Callable[[Path], None]] = {
    "before-reboot": before_reboot,
    "after-reboot": after_reboot,
    "with-udevd": with_udevd,
}

if __name__ == "__main__":
    _NAMED[sys.argv[1]](Path(sys.argv[2]))
