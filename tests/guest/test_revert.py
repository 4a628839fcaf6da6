"""`restore --in-place` on real volumes: the data of the snapshot, and nothing half done, whoever is killed."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.catalog.inplace import inplace_records
from snapmgr.cli.main import main
from snapmgr.testing.processes import spawn
from support import lvm
from support.scene import Scene
from support.server import private_server
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("root")

_MIB = 1 << 20


class VolumeScene(Scene):
    """A logical volume with a job "demo" for a folder on it, or for the server that `scene.server` is."""

    origin: lvm.Origin

    def watch(self, source: str) -> None:
        """Write the configuration, with these lines for the job's source."""
        backend = f'[backend.lvm]\ncow_size = "50%"\nscratch_dir = "{self.folder}/cow"\n'
        # Files that come and go in seconds are no sign of what will be in an hour.
        self.configure(text=f'{backend}[job.demo]\nbackend = "lvm"\ncapacity_warn_within = "1s"\n{source}\n')

    @property
    def data(self) -> Path:
        """The folder that the job takes."""
        return self.origin.point / "data"

    def write(self, byte: bytes, mib: int = 24) -> None:
        """Fill the one file with `byte`."""
        path = self.data / "file"
        # In place: else a CoW table holds ever more.
        with path.open("r+b" if path.exists() else "wb") as file:
            for _ in range(mib):
                file.write(byte * _MIB)
            os.fsync(file.fileno())

    def holds(self) -> bytes:
        """Return what the one file begins with."""
        return (self.data / "file").read_bytes()[:1]

    def restore(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `restore demo@latest --in-place`."""
        return self.run("restore", "demo@latest", "--in-place", *arguments)

    def clean(self) -> bool:
        """Whether doctor has nothing to complain of, no record is left, and the volume is mounted."""
        done = self.run("doctor")
        assert done.returncode == 0, done.stdout + done.stderr
        return inplace_records(self.context().catalog) == () and self.origin.point.is_mount()


@contextmanager
def _scene(vg: lvm.VolumeGroup, kind: str, *, size_mib: int = 320) -> Iterator[VolumeScene]:
    with work_folder() as folder:
        if kind == "thin":
            vg.pool(data_mib=1024)
            origin = vg.thin_origin(size_mib=size_mib, fs_type="xfs")
        else:
            origin = vg.classic_origin(size_mib=size_mib, fs_type="ext4")
        scene = VolumeScene(None, folder, None)  # no loop file system
        scene.origin = origin
        scene.data.mkdir()
        scene.watch(f'source = "directory"\npath = "{scene.data}"')
        yield scene


def _sha256(device: str) -> str:
    with open(device, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _database(scene: VolumeScene) -> tuple[int, str]:
    rows = scene.server.query("SELECT COUNT(*) FROM d.t")
    return rows[0][0], scene.server.query("SELECT @@gtid_binlog_pos")[0][0]


def _refuse_what_is_in_use(scene: VolumeScene) -> None:
    """It is refused while the server runs, without an answer, and while somebody works there: nothing is changed."""
    busy = scene.restore("--yes")
    assert busy.returncode == 1
    assert f"a server (pid {scene.server.pid}) runs on {scene.data}" in busy.stderr
    scene.server.stop()
    unasked = scene.restore()
    assert unasked.returncode == 2, unasked.stderr
    assert "there is no terminal to ask" in unasked.stderr
    assert "with everything else on it: beside" in unasked.stderr
    with subprocess.Popen(["sleep", "60"], cwd=scene.origin.point) as holder:
        held = scene.restore("--yes")
        assert held.returncode == 1
        assert f"sleep (pid {holder.pid}" in held.stderr
        holder.kill()
    assert (scene.origin.point / "beside").exists()
    assert inplace_records(scene.context().catalog) == ()


@pytest.mark.parametrize("kind", ["classic", "thin"])
def test_a_server_has_the_data_of_the_snapshot_again(vg, kind):
    with _scene(vg, kind, size_mib=512) as scene:
        shutil.rmtree(scene.data)
        with private_server(scene.data, ("--log-bin",)) as server:
            scene._server = server
            scene.watch(f'source = "mysql"\nsocket = "{server.socket}"\nuser = "root"')
            server.query("CREATE DATABASE d")
            server.query("CREATE TABLE d.t (a INT)")
            server.query("INSERT INTO d.t SELECT seq FROM d.seq_1_to_1000")
            assert scene.run("backup", "demo").returncode == 0
            before = scene.entries()[0].manifest
            assert before.position is not None
            assert _database(scene) == (1000, before.position.gtid)
            server.query("DELETE FROM d.t WHERE a > 10")
            (scene.origin.point / "beside").write_text("lost")
            _refuse_what_is_in_use(scene)

            done = scene.restore("--yes")
            assert done.returncode == 0, done.stderr
            assert not (scene.origin.point / "beside").exists()
            after = scene.entries()[0].manifest
            if kind == "classic":
                assert after.state == "broken"
                assert (after.reason or "").startswith("merged into its origin at ")
                assert "the restore consumes the snapshot" in done.stderr
                assert "newest READY" in done.stderr
            else:
                assert after.state == "ready"
                assert after.members[0].ref.native_id != before.members[0].ref.native_id
            server.start()
            assert _database(scene) == (1000, before.position.gtid)
            assert scene.run("backup", "demo").returncode == 0
            assert scene.clean()
            server.stop()
            if kind == "thin":
                # The snapshot that was kept can be put back again, and then LVM does not know the later one.
                again = scene.run("restore", before.id, "--in-place", "--yes")
                assert again.returncode == 0, again.stderr
                later = scene.restore("--dry-run")
                assert later.returncode == 1
                assert "any more, since another one was put back" in later.stderr


def test_siblings_of_a_classic_snapshot_stay_valid_or_are_named(vg):
    with _scene(vg, "classic") as scene:
        scene.write(b"1")
        assert scene.run("backup", "demo").returncode == 0
        scene.write(b"2")
        assert scene.run("backup", "demo").returncode == 0
        wanted = scene.entries()[-1].manifest.id
        scene.write(b"3")
        lvm.run("lvcreate", "--yes", "--snapshot", "--size", "8m", "--name", "foreign", f"{vg.name}/{scene.origin.lv}")
        refused = scene.run("restore", wanted, "--in-place", "--yes")
        assert refused.returncode == 1
        assert f"the snapshot {vg.name}/foreign may need up to " in refused.stderr
        assert "lvextend --size +" in refused.stderr
        assert scene.holds() == b"3"
        lvm.run("lvextend", "--yes", "--size", "+60m", f"{vg.name}/foreign")
        bound = scene.folder / "bound"
        bound.mkdir()
        lvm.run("mount", "--bind", scene.data, bound)
        lvm.run("mount", "-o", "remount,bind,ro,noexec", bound)
        older = scene.entries()[0].manifest
        devices = [vg.device(older.members[0].ref.name), vg.device("foreign")]
        sums = [_sha256(device) for device in devices]

        lease = scene.json("mount", older.id)["mount"]
        attached = scene.run("restore", wanted, "--in-place", "--yes")
        assert attached.returncode == 1
        assert f"{older.id} is attached at {lease['point']}" in attached.stderr
        assert scene.run("umount", older.id).returncode == 0

        done = scene.run("restore", wanted, "--in-place", "--yes")
        assert done.returncode == 0, done.stderr
        assert "warning: " + str(bound) not in done.stderr
        assert scene.holds() == b"2"
        assert (bound / "file").read_bytes()[:1] == b"2"
        with pytest.raises(OSError, match="Read-only"):
            (bound / "new").touch()
        assert [_sha256(device) for device in devices] == sums
        lvm.run("umount", bound)
        assert scene.states() == ["ready", "broken"]
        # A device on the volume, as a LUKS container is.
        lvm.run("umount", scene.origin.point)
        lvm.run("dmsetup", "create", "above", "--table", f"0 8192 linear {scene.origin.device} 0")
        stacked = scene.run("restore", older.id, "--in-place", "--yes")
        assert stacked.returncode == 1
        assert "other devices use the volume: above" in stacked.stderr
        lvm.run("dmsetup", "remove", "--retry", "above")
        lvm.run("mount", scene.origin.device, scene.origin.point)
        lvm.run("lvremove", "--yes", f"{vg.name}/foreign")
        oldest = scene.run("restore", older.id, "--in-place", "--yes")
        assert oldest.returncode == 0, oldest.stderr
        assert scene.holds() == b"1"
        assert scene.clean()


def _killed(scene: VolumeScene, point: str) -> bool:
    """Run `restore --in-place` in a child that dies before it starts a program for the first time, or right after it.

    `point` is the program's name: "lvconvert" for the former, "lvconvert+" for the latter.
    """

    def act() -> None:
        started: list[str] = []

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            if event == "subprocess.Popen":
                # Before the next one is started, the one before it has ended.
                if point.removesuffix("+") in started:
                    os.kill(os.getpid(), signal.SIGKILL)
                started.append(os.path.basename(str(arguments[0])))
                if started[-1] == point:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        main(["--config", str(scene.config_file), "restore", "demo@latest", "--in-place", "--yes"])

    return os.waitstatus_to_exitcode(os.waitpid(spawn(act), 0)[1]) == -signal.SIGKILL


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "points"),
    [("thin", ("lvconvert", "lvrename")), ("classic", ("lvconvert", "lvconvert+"))],
)
def test_whoever_kills_it_the_next_call_or_doctor_converges(vg, kind, points):
    with _scene(vg, kind) as scene:
        mapped = f"{vg.name}-{scene.origin.lv}"
        for turn, point in enumerate(points):
            scene.write(b"1")
            assert scene.run("backup", "demo").returncode == 0
            taken = scene.entries()[-1].manifest.id
            scene.write(b"2")
            assert _killed(scene, point), point
            (record,) = inplace_records(scene.context().catalog)
            if turn == 0:
                refused = scene.run("backup", "demo")
                assert refused.returncode == 3, refused.stderr
                assert f"snapmgr restore {taken} --in-place" in refused.stderr
                # As a killed lvconvert leaves it: what is loaded must never go live.
                size = lvm.run("blockdev", "--getsz", scene.origin.device).strip()
                lvm.run("dmsetup", "load", mapped, "--table", f"0 {size} error")
            if turn % 2:
                done = scene.run("restore", taken, "--in-place", "--yes")
                assert done.returncode == 0, (point, done.stderr)
                assert scene.holds() == b"1"
            else:
                done = scene.run("doctor", "--fix")
                assert done.returncode == 0, done.stdout + done.stderr
                undone = f"the in-place restore of {taken} is undone" in done.stderr
                assert undone == (point == "lvconvert")
                assert undone == (record.step == "merging")
                assert undone or f"{taken} is completed" in done.stderr
                assert scene.holds() == (b"2" if undone else b"1")
            assert inplace_records(scene.context().catalog) == ()
            assert lvm.run("dmsetup", "info", "-c", "--noheadings", "-o", "tables_loaded", mapped).strip() == "Live"
            assert not [name for name in vg.names() if name.startswith("snapmgr.revert.")]
            tags = next(row["lv_tags"] for row in vg.lvs("lv_name", "lv_tags") if row["lv_name"] == scene.origin.lv)
            assert tags == ""
        assert scene.clean()
