"""What runs full on real device-mapper: it is seen coming, and what is lost by it is never used."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from snapmgr.access import autoextend as relief
from snapmgr.capacity import series as fill
from snapmgr.cli.main import main
from support.lvm import run

if TYPE_CHECKING:
    from pathlib import Path

    from support.lvm import Origin, VolumeGroup

pytestmark = pytest.mark.needs("device-mapper", "scratch-disk")

_MIB = 1 << 20


@dataclass
class Command:
    """The command line in this process, with one job for one origin."""

    capsys: pytest.CaptureFixture[str]
    folder: Path
    origin: Origin
    lvm: dict[str, Any] = field(default_factory=dict)
    job: dict[str, Any] = field(default_factory=dict)
    said: str = ""

    def __call__(self, *arguments: str) -> int:
        settings = {"scratch_dir": f"{self.folder}/cow", **self.lvm}
        job = {"source": "directory", "path": str(self.origin.point), "verify.command": ["ls", "{}"], **self.job}
        lines = [f'state_dir = "{self.folder}/state"', f'scratch_dir = "{self.folder}/scratch"', "[backend.lvm]"]
        lines += [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
        lines += ["[job.files]", *(f"{key} = {json.dumps(value)}" for key, value in job.items())]
        config = self.folder / "snapmgr.toml"
        config.write_text("\n".join(lines))
        self.capsys.readouterr()
        code = main(["--config", str(config), *arguments])
        out, err = self.capsys.readouterr()
        self.said = out + err
        return code

    def document(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        assert self(*arguments, "--json") == code, self.said
        document: dict[str, Any] = json.loads(self.said[self.said.index("{") :])
        return document

    def snapshots(self) -> dict[str, dict[str, Any]]:
        """Return all snapshots by id, oldest first."""
        return {one["id"]: one for one in self.document("list")["snapshots"]}

    def write(self, size_mib: int, name: str = "data") -> None:
        """Overwrite a file of the origin, down to the disk."""
        with open(self.origin.point / name, "wb", buffering=0) as file:
            file.writelines(os.urandom(_MIB) for _ in range(size_mib))
            os.fsync(file.fileno())


@pytest.fixture
def snapmgr(vg: VolumeGroup, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """A classic origin of 96 MiB with CoW tables of 8 MiB."""
    return Command(capsys, tmp_path, vg.classic_origin("db", size_mib=96), lvm={"cow_size": "7M"})


def test_an_overflow_during_a_mount_breaks_the_snapshot_and_the_next_run_takes_a_good_one(
    vg: VolumeGroup, snapmgr: Command
) -> None:
    assert snapmgr("backup", "files") == 0, snapmgr.said
    first = next(iter(snapmgr.snapshots()))
    mount = snapmgr.document("mount", "latest")["mount"]
    snapmgr.write(20)

    # Seen by doctor, which changes nothing, and refused where it would be used.
    assert snapmgr("doctor") == 1
    assert f"{first} is lost: its CoW table overflowed" in snapmgr.said
    assert snapmgr("mount", "latest") == 1
    assert "is lost: its CoW table overflowed between" in snapmgr.said
    broken = snapmgr.snapshots()[first]
    assert broken["state"] == "broken"
    assert broken["reason"].endswith("8.0 MiB of 8.0 MiB")
    for command in ("verify", "mount"):
        assert snapmgr(command, first) == 1
        assert "BROKEN: its CoW table overflowed" in snapmgr.said
    # As long as somebody looks at it, it is there.
    assert f"snapmgr.{first}" in vg.names()
    assert snapmgr("status") == 1
    assert "is lost: its CoW table overflowed" in snapmgr.said
    assert snapmgr("umount", mount["point"]) == 0, snapmgr.said
    assert snapmgr("backup", "files") == 0, snapmgr.said
    assert f"snapmgr.{first}" not in vg.names()

    # An overflow that nobody saw yet: the run exits non-zero, with a new good snapshot.
    snapmgr.write(20)
    assert snapmgr("backup", "files") == 5
    assert "is READY, but snapshot" in snapmgr.said
    assert "is lost: its CoW table overflowed between" in snapmgr.said
    states = [(one["state"], one["id"]) for one in snapmgr.snapshots().values()]
    assert [state for state, _ in states] == ["broken", "broken", "ready"]
    assert vg.names() == ["db", f"snapmgr.{states[-1][1]}"]
    assert snapmgr("status") == 0, snapmgr.said


def test_a_forecast_rests_on_samples_and_a_threshold_sets_the_exit_code(
    vg: VolumeGroup, snapmgr: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A minute between samples is for people; the samples are real.
    monkeypatch.setattr(fill, "_LEAST_SPAN_S", 1.0)
    snapmgr.lvm["cow_size"] = "24M"
    snapmgr.job["capacity_warn"] = "99%"
    snapmgr.job["capacity_warn_within"] = "0"
    assert snapmgr("backup", "files") == 0, snapmgr.said
    for number in range(3):
        snapmgr.write(3, f"data{number}")
        time.sleep(1.5)
        assert snapmgr("prune") == 0, snapmgr.said
    (job,) = snapmgr.document("status")["jobs"]
    own = next(one for one in job["capacity"] if one["snapshot_id"])
    assert 9 * _MIB < own["used_bytes"] < 14 * _MIB
    assert own["size_bytes"] == 28 * _MIB
    # About 3 MiB in the time of a round, whatever this machine is.
    left_s = (own["size_bytes"] - own["used_bytes"]) / own["rate_bytes_s"]
    assert own["rate_bytes_s"] > 0
    assert own["full_in_s"] == pytest.approx(left_s, abs=5)
    assert snapmgr("list") == 0
    assert "% full, full in" in snapmgr.said
    assert snapmgr("show", "latest") == 0
    assert "CoW table 28.0 MiB, chunks of 16.0 KiB: cow_size 24M" in snapmgr.said

    snapmgr.job["capacity_warn_within"] = "1d"
    assert snapmgr("status") == 1
    assert "once it is full, the snapshot is lost" in snapmgr.said

    # It came as it was foreseen; doctor mends what can be mended of that.
    snapmgr.write(30)
    snapmgr("doctor", "--fix")
    assert "marks it BROKEN and deletes its storage" in snapmgr.said
    assert [one["state"] for one in snapmgr.snapshots().values()] == ["broken"]
    assert vg.names() == ["db"]


def test_a_volume_group_without_room_takes_no_snapshot_and_says_what_it_needs(
    vg: VolumeGroup, snapmgr: Command
) -> None:
    assert snapmgr("backup", "files") == 0, snapmgr.said
    run("lvcreate", "--yes", "--zero", "n", "--wipesignatures", "n", "--extents", "100%FREE", "--name", "rest", vg.name)
    before = vg.names()
    assert snapmgr("backup", "files") == 1
    assert "its CoW table needs 8.0 MiB" in snapmgr.said
    assert f"and 0 B are free in {vg.name}" in snapmgr.said
    assert vg.names() == before
    assert len(snapmgr.snapshots()) == 1
    assert snapmgr("status") == 1
    assert "the next snapshot takes about 8.0 MiB: no snapshot can be taken" in snapmgr.said


def test_a_snapshot_that_runs_full_while_it_is_verified_is_lost_and_with_more_room_it_passes(
    vg: VolumeGroup, snapmgr: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relief, "EVERY_S", 0.3)
    # While the check runs, more is written to the origin than the table has room for.
    write = f"dd if=/dev/urandom of={snapmgr.origin.point}/more$n bs=1M count=3 conv=fsync 2>&1 || exit 1"
    snapmgr.job["verify.command"] = ["sh", "-c", f"for n in 1 2 3 4; do {write}; done; ls $0", "{}"]
    assert snapmgr("backup", "files") == 0, snapmgr.said
    assert snapmgr("verify", "latest") == 1
    assert "is lost: its CoW table overflowed between" in snapmgr.said
    (snapshot,) = snapmgr.snapshots().values()
    assert (snapshot["state"], snapshot["verification"]) == ("broken", None)
    run("rm", "-r", *snapmgr.origin.point.glob("more*"))

    # Now as fast as room is given, however slow this machine is.
    percent = f"lvs --noheadings --options snap_percent --select lv_name=~^snapmgr {vg.name}"
    wait = f'while set -- $({percent}); [ "${{1%.*}}" -ge 70 ]; do sleep 0.2; done'
    snapmgr.job["verify.command"] = ["sh", "-c", f"for n in 1 2 3 4; do {write}; {wait}; done; ls $0", "{}"]
    snapmgr.lvm["auto_extend"] = True
    assert snapmgr("backup", "files") == 0, snapmgr.said
    assert snapmgr("verify", "latest") == 0, snapmgr.said
    assert "enlarged from 8.0 MiB to 12.0 MiB" in snapmgr.said
    _, snapshot = snapmgr.snapshots().values()
    assert snapshot["verification"]["result"] == "passed"
    (size,) = [int(row["lv_size"]) for row in vg.lvs("lv_name", "lv_size") if row["lv_name"].startswith("snapmgr")]
    assert size > 12 * _MIB


def test_a_thin_pool_is_guarded_before_it_is_full_and_its_state_is_told(
    vg: VolumeGroup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Without the wait of a minute that a full pool makes otherwise.
    vg.pool("pool", data_mib=64, metadata_mib=4)
    run("lvchange", "--errorwhenfull", "y", f"{vg.name}/pool")
    snapmgr = Command(capsys, tmp_path, vg.thin_origin("db", pool="pool", size_mib=96, fs_type="ext4"))
    assert snapmgr("backup", "files") == 0, snapmgr.said
    (job,) = snapmgr.document("status")["jobs"]
    assert [one["name"] for one in job["capacity"]] == [
        f"data of the thin pool {vg.name}/pool",
        f"metadata of the thin pool {vg.name}/pool",
    ]

    snapmgr.lvm["pool_metadata_limit"] = "0.1%"
    assert snapmgr("backup", "files") == 1
    assert "metadata are" in snapmgr.said
    assert "lvextend --poolmetadatasize +" in snapmgr.said
    del snapmgr.lvm["pool_metadata_limit"]

    snapmgr.write(48)
    assert snapmgr("backup", "files") == 1
    assert f"% full in the thin pool {vg.name}/pool" in snapmgr.said
    assert "lvextend --size +" in snapmgr.said
    assert len(snapmgr.snapshots()) == 1
    assert snapmgr("status") == 1
    assert "once it is full, the database itself cannot write" in snapmgr.said

    with pytest.raises(OSError, match="error|space"):
        snapmgr.write(40, "more")
    assert snapmgr("doctor") == 1
    assert f"data of the thin pool {vg.name}/pool is full or damaged" in snapmgr.said
    run("lvextend", "--yes", "--size", "+128m", f"{vg.name}/pool")
    snapmgr("doctor")
    assert "is full or damaged" not in snapmgr.said
