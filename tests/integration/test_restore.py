"""Restoring to a folder of its own: what a server finds there, what a directory holds, what is refused and left."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from snapmgr import landing, probe
from snapmgr.blockdev import read_mounts
from snapmgr.catalog import Catalog
from snapmgr.errors import StorageError
from snapmgr.jobs import replica
from snapmgr.jobs.backup import backup
from snapmgr.jobs.restore import RestoreDiffersError, restore, restore_leftovers
from snapmgr.testing import trees
from snapmgr.tree.kernel import rename_new
from support.load import check_invariant, write_load
from support.scene import SERVER_OPTIONS, Scene, btrfs_scene
from support.server import private_server, server_user
from support.storage import loop_filesystem, work_folder

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "ext4")
_LARGE_BYTES = 160 << 20


@pytest.fixture(name="other", scope="module")
def _other():
    with loop_filesystem("ext4", 640 << 20) as system:
        yield system


@pytest.fixture(name="files", scope="module")
def _files():
    """A scene whose job is of a directory with everything in it, and with one snapshot."""
    with btrfs_scene(server=False) as scene:
        data = Path(scene.file_system.point) / "mysql" / "files"
        data.mkdir()
        trees.plant(data)
        scene.scratch.mkdir()
        scene.configure(text=f'[job.demo]\nsource = "directory"\npath = "{data}"\n')
        assert scene.run("backup", "demo").returncode == 0
        scene.data = data
        yield scene
        for point in [mount.point for mount in read_mounts() if mount.point.startswith(f"{scene.folder}/")]:
            subprocess.run(["umount", point], check=False)


@pytest.fixture(name="large", scope="module")
def _large():
    """The same with one file that takes a while to copy."""
    with btrfs_scene(server=False) as scene:
        data = Path(scene.file_system.point) / "mysql" / "files"
        data.mkdir()
        (data / "a").write_text("first")
        (data / "z").write_bytes(os.urandom(1 << 20) * (_LARGE_BYTES >> 20))
        scene.configure(text=f'[job.demo]\nsource = "directory"\npath = "{data}"\n')
        assert scene.run("backup", "demo").returncode == 0
        scene.data = data
        yield scene


def _nothing_left(scene):
    assert not scene.entries() or Catalog(scene.state).leases() == ([], [])
    for folder in (scene.state / "restores", scene.scratch):
        assert not folder.exists() or os.listdir(folder) == []


def test_everything_is_kept_on_another_file_system(files, other):
    dest = other.point / "copy"
    document = files.json("restore", "latest", str(dest))
    trees.same(trees.fingerprint(files.data), trees.fingerprint(dest))
    assert (dest / "sparse").stat().st_blocks * 512 < trees.HOLE_BYTES // 4
    done = document["restored"]
    assert done["copied_files"] > 10
    assert done["shared_files"] == 0
    assert done["differences"] == []
    assert done["special"] == 3
    _nothing_left(files)
    subprocess.run(["rm", "-r", dest], check=True)


def test_blocks_are_shared_on_the_same_file_system(files):
    dest = Path(files.file_system.point) / "copy"
    dest.mkdir()
    document = files.json("restore", "latest", str(dest))
    trees.same(trees.fingerprint(files.data), trees.fingerprint(dest))
    assert document["restored"]["copied_files"] == 0
    assert document["restored"]["shared_files"] > 10
    _nothing_left(files)


def test_the_attribute_nocow_is_kept_so_that_blocks_can_be_shared(files):
    nocow = files.data / "nocow"
    nocow.mkdir()
    subprocess.run(["chattr", "+C", nocow], check=True)
    (nocow / "ibdata1").write_bytes(b"x" * 70_000)
    try:
        assert files.run("backup", "demo").returncode == 0
        dest = Path(files.file_system.point) / "nocow"
        assert files.json("restore", "latest", str(dest))["restored"]["copied_files"] == 0
        listed = subprocess.run(["lsattr", dest / "nocow"], check=True, capture_output=True, text=True).stdout
        assert "C" in listed.split()[0]
    finally:
        (nocow / "ibdata1").unlink()
        nocow.rmdir()
        trees_time = 981_173_106_123_456_789
        os.utime(files.data, ns=(trees_time, trees_time))
    assert files.run("backup", "demo").returncode == 0


def test_what_leads_back_into_the_source_is_named_and_nested_subvolumes_are_empty(large):
    back, nested = large.data / "back \udcff", large.data / "nested"
    back.symlink_to(f"{large.data}/\udcff")
    (large.data / "away").symlink_to("/etc")
    subprocess.run(["btrfs", "-q", "subvolume", "create", nested], check=True)
    (nested / "inside").touch()
    dest = Path(large.file_system.point) / "led"
    try:
        assert large.run("backup", "demo").returncode == 0
        document = large.json("restore", "latest", str(dest))
        assert document["restored"]["leads"] == [
            {"where": f"{dest}/back \\xff", "to": f"{large.data}/\\xff", "live": True}
        ]
        assert document["restored"]["excluded"] == [str(nested)]
        assert os.readlink(dest / "back \udcff") == f"{large.data}/\udcff"
        assert os.listdir(dest / "nested") == []
    finally:
        back.unlink()
        (large.data / "away").unlink()
        subprocess.run(["btrfs", "-q", "subvolume", "delete", nested], check=True)
        assert large.run("backup", "demo").returncode == 0


def test_a_frozen_destination_is_an_error_not_a_hanging_process(large, monkeypatch):
    monkeypatch.setattr(probe, "ANSWER_S", 0.5)
    with loop_filesystem("ext4", 64 << 20, base=Path("/dev/shm")) as frozen:
        subprocess.run(["fsfreeze", "-f", frozen.point], check=True)
        try:
            ctx = large.context()
            with pytest.raises(StorageError, match="did not answer"):
                restore(ctx, ctx.catalog.resolve("latest"), str(frozen.point / "x"))
        finally:
            subprocess.run(["fsfreeze", "-u", frozen.point], check=True)
        assert os.listdir(frozen.point) == ["lost+found"]


def test_a_new_file_systems_own_folder_does_not_count(files):
    with loop_filesystem("ext4", 64 << 20, base=Path("/dev/shm")) as fresh:
        files.json("restore", "latest", str(fresh.point))
        restored = trees.fingerprint(fresh.point)
        assert restored.pop(b"lost+found")
        trees.same(trees.fingerprint(files.data), restored)


def test_the_document_has_every_key(files):
    dest = files.folder / "keys"
    planned = files.json("restore", "latest", str(dest), "--dry-run")
    assert not dest.exists()
    assert planned["restored"] is None
    assert planned["places"] == [{"original": str(files.data), "path": str(dest)}]
    document = files.json("restore", "latest", str(dest), "--no-check")
    assert set(document) == {
        "schema_version",
        "command",
        "exit_code",
        "error",
        "dry_run",
        "snapshot_id",
        "dest",
        "places",
        "restored",
    }
    assert set(document["restored"]) == {
        "data_path",
        "files",
        "links",
        "folders",
        "symlinks",
        "special",
        "size_bytes",
        "shared_files",
        "copied_files",
        "copied_bytes",
        "contents_compared",
        "differences",
        "options",
        "leads",
        "excluded",
        "duration_s",
    }
    assert document["restored"]["contents_compared"] is False
    assert document["dest"] == document["restored"]["data_path"] == str(dest)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("full", "is not empty: it holds keep"),
        ("link", "is a symlink"),
        ("file", "is no folder"),
        ("no/such", "is no folder that exists"),
        ("state/x", "lies in the state directory"),
        ("scratch/x", "lies in the scratch directory"),
        ("in the source", "lies in the source"),
        ("\udcff", "not UTF-8"),
    ],
)
def test_what_may_not_be_restored_to(files, place, said):
    dest = files.folder / "may" / place
    dest.parent.mkdir(exist_ok=True) if place in ("full", "link", "file") else None
    if place == "full":
        dest.mkdir()
        (dest / "keep").touch()
    elif place == "link":
        dest.symlink_to(files.folder)
    elif place == "file":
        dest.touch()
    elif place.startswith(("state", "scratch")):
        dest = files.folder / place
    elif place == "in the source":
        dest = files.data / "x"
    arguments = ["restore", "latest", str(dest)]
    for more in ([], ["--dry-run"]):
        done = files.run(*arguments, *more)
        assert done.returncode == 2, done.stderr
        assert said in done.stderr
        assert "hint: " in done.stderr
    if place == "full":
        assert os.listdir(dest) == ["keep"]
    _nothing_left(files)


@pytest.mark.parametrize("state", ["broken", "pending", "deleting"])
def test_only_a_ready_snapshot_is_restored(files, state):
    catalog = Catalog(files.state)
    manifest = files.entries()[-1].manifest
    unfit = replace(manifest, id=manifest.id[:-8] + "0badbad0").with_state(state, reason="a test")
    catalog.write(unfit)
    try:
        done = files.run("restore", unfit.id, str(files.folder / "unfit"))
        assert done.returncode == 1
        assert f"is {state.upper()}" in done.stderr
        assert not (files.folder / "unfit").exists()
    finally:
        catalog.forget(unfit.id)


@contextmanager
def _caught_copying(scene, dest):
    """Start a restore and stop the process in the middle of its copying."""
    process = scene.start("restore", "latest", str(dest))
    try:
        deadline = time.monotonic() + 30
        while True:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            with suppress(OSError, StopIteration):
                begun = next(dest.glob(".snapmgr-restore-*/tree/z"))
                if begun.stat().st_blocks:
                    break
        os.kill(process.pid, signal.SIGSTOP)
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("existed", [True, False])
def test_sigterm_leaves_nothing(large, other, existed):
    dest = other.point / "ended"
    if existed:
        dest.mkdir()
    with _caught_copying(large, dest) as process:
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGCONT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert out == ""
    assert dest.exists() == existed
    if existed:
        assert os.listdir(dest) == []
        dest.rmdir()
    _nothing_left(large)


def test_after_sigkill_the_next_one_clears_up_and_restores(large, other):
    dest = other.point / "killed"
    with _caught_copying(large, dest) as process:
        process.kill()
        process.communicate()
    assert len(os.listdir(dest)) == 1
    assert len(Catalog(large.state).leases()[0]) == 1
    done = large.run("restore", "latest", str(dest))
    assert done.returncode == 0, done.stderr
    trees.same(trees.fingerprint(large.data), trees.fingerprint(dest))
    _nothing_left(large)
    subprocess.run(["rm", "-r", dest], check=True)


def test_killed_while_it_moves_all_up_the_next_one_finishes_and_reports_the_same(files):
    dest = Path(files.file_system.point) / "almost"
    child = os.fork()
    if child == 0:
        calls = iter(range(5))

        def die(*arguments):
            if next(calls) == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            rename_new(*arguments)

        landing.rename_new = die
        ctx = files.context()
        restore(ctx, ctx.catalog.resolve("latest"), str(dest))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(os.listdir(dest)) == 5
    done = files.run("restore", "latest", str(dest), "--json")
    assert done.returncode == 0, done.stderr
    assert "complete but for its last step, which is done now" in done.stderr
    assert json.loads(done.stdout)["restored"]["shared_files"] > 10
    trees.same(trees.fingerprint(files.data), trees.fingerprint(dest))
    _nothing_left(files)


def test_leftovers_are_named_and_removed_and_nothing_else(large, other):
    dest = other.point / "left"
    with _caught_copying(large, dest) as process:
        ctx = large.context()
        (active,) = restore_leftovers(ctx)
        assert active.active
        assert "under way after all" in active.remove()
        assert len(list(dest.iterdir())) == 1
        process.kill()
        process.communicate()
    (dest / "somebody's").touch()
    (leftover,) = restore_leftovers(ctx)
    assert not leftover.active
    assert str(dest) in leftover.what
    assert "is removed" in leftover.remove()
    assert os.listdir(dest) == ["somebody's"]
    assert restore_leftovers(ctx) == ()
    assert "is removed" in leftover.remove()
    (dest / "somebody's").unlink()
    dest.rmdir()
    # The mount that the killed one had is removed by the next restore of the snapshot.
    assert large.run("restore", "latest", str(dest), "--no-check").returncode == 0
    _nothing_left(large)
    subprocess.run(["rm", "-r", dest], check=True)


def test_two_restores_to_one_folder(large, other):
    dest = other.point / "both"
    with _caught_copying(large, dest) as process:
        second = large.run("restore", "latest", str(dest))
        assert second.returncode == 3
        assert "another restore to" in second.stderr
        os.kill(process.pid, signal.SIGCONT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    trees.same(trees.fingerprint(large.data), trees.fingerprint(dest))
    _nothing_left(large)
    again = large.run("restore", "latest", str(dest))
    assert again.returncode == 2
    assert "is not empty" in again.stderr
    subprocess.run(["rm", "-r", dest], check=True)


def test_a_copy_of_a_half_made_tree_is_not_ours(large, other):
    dest = other.point / "half"
    with _caught_copying(large, dest) as process:
        process.kill()
        process.communicate()
    theirs = other.point / "theirs"
    subprocess.run(["cp", "-a", dest, theirs], check=True)
    before = trees.fingerprint(theirs)
    done = large.run("restore", "latest", str(theirs))
    assert done.returncode == 2
    assert "is not empty" in done.stderr
    trees.same(before, trees.fingerprint(theirs))
    (leftover,) = restore_leftovers(large.context())
    leftover.remove()
    assert not dest.exists()
    subprocess.run(["rm", "-r", theirs], check=True)


def test_what_does_not_fit_is_not_begun(large):
    with loop_filesystem("ext4", 64 << 20, base=Path("/dev/shm")) as small:
        done = large.run("restore", "latest", str(small.point / "x"))
        assert done.returncode == 1
        assert "the copy needs about 16" in done.stderr
        assert os.listdir(small.point) == ["lost+found"]
    _nothing_left(large)


def test_a_disk_that_fills_up_in_the_middle(large, monkeypatch):
    class Plenty:
        f_blocks = f_bfree = f_bavail = f_files = f_favail = 1 << 40
        f_frsize = 4096

    with loop_filesystem("ext4", 64 << 20, base=Path("/dev/shm")) as small:
        monkeypatch.setattr(replica.os, "fstatvfs", lambda _fd: Plenty)
        ctx = large.context()
        with pytest.raises(StorageError, match="no room is left for z") as caught:
            restore(ctx, ctx.catalog.resolve("latest"), str(small.point / "x"))
        assert "make room" in (caught.value.hint or "")
        monkeypatch.undo()
        assert os.listdir(small.point) == ["lost+found"]
    _nothing_left(large)


def test_a_disk_that_writes_something_else_is_found_out(large, other, monkeypatch):
    synced = replica.sync_file_system

    def corrupt(fd):
        synced(fd)
        (hidden,) = [name for name in os.listdir(fd) if name.startswith(".snapmgr-restore-")]
        path = f"/proc/self/fd/{fd}/{hidden}/tree/z"
        info = os.stat(path)
        with open(path, "r+b") as file:
            file.seek(_LARGE_BYTES // 2)
            byte = file.read(1)[0]
            file.seek(_LARGE_BYTES // 2)
            file.write(bytes([byte ^ 1]))
            os.fsync(file.fileno())
        os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
        monkeypatch.undo()

    monkeypatch.setattr(replica, "sync_file_system", corrupt)
    ctx = large.context()
    dest = other.point / "damaged"
    with pytest.raises(RestoreDiffersError, match="z has other contents") as caught:
        restore(ctx, ctx.catalog.resolve("latest"), str(dest))
    assert caught.value.exit_code == 6
    assert "z has other contents" in (dest / replica.DIFFERS_FILE).read_text()
    assert (dest / "a").read_text() == "first"
    _nothing_left(large)
    subprocess.run(["rm", "-r", dest], check=True)


def test_attributes_that_the_destination_cannot_hold_are_named(files):
    # ramfs has no extended attributes, no ACLs, and says 0 when asked for its size.
    poor = files.folder / "poor"
    poor.mkdir()
    subprocess.run(["mount", "-t", "ramfs", "ramfs", poor], check=True)
    try:
        done = files.run("restore", "latest", str(poor / "x"), "--json")
        assert done.returncode == 6, done.stderr
        document = json.loads(done.stdout)
        assert "acl lacks the extended attribute system.posix_acl_access" in document["restored"]["differences"]
        assert document["error"]["exit_code"] == 6
        assert "plain lacks the extended attribute user." in (poor / "x" / replica.DIFFERS_FILE).read_text()
        assert (poor / "x" / "plain").read_bytes() == (files.data / "plain").read_bytes()
    finally:
        subprocess.run(["umount", poor], check=True)


@pytest.mark.needs("xfs")
def test_somebody_who_is_not_root_restores_his_own():
    with loop_filesystem("xfs", 320 << 20) as system, work_folder() as folder:
        data = system.point / "files"
        (data / "closed").mkdir(parents=True)
        (data / "closed/file").write_text("x" * 9000)
        (data / "open").write_text("y" * 9000)
        os.link(data / "open", data / "closed/again")
        (data / "closed").chmod(0o555)
        config = folder / "snapmgr.toml"
        config.write_text(
            f'state_dir = "{folder}/state"\nscratch_dir = "{folder}/scratch"\n'
            f'[job.demo]\nsource = "directory"\npath = "{data}"\nbackend = "reflink"\n'
        )
        user = server_user()
        owner = f"{user.pw_uid}:{user.pw_gid}"
        subprocess.run(["chown", "-R", owner, system.point, folder], check=True)

        def run(*arguments):
            ids = (f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups")
            command = ("setpriv", *ids, "--", sys.executable, "-m", "snapmgr", "-c", config, *arguments)
            return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")

        assert run("backup", "demo").returncode == 0
        for dest in (system.point / "new", folder / "elsewhere"):
            done = run("restore", "latest", dest)
            assert done.returncode == 0, done.stderr
            trees.same(trees.fingerprint(data), trees.fingerprint(dest))
        done = run("restore", "latest", "/usr/not-allowed")
        assert done.returncode == 7
        assert "no right to restore to /usr/not-allowed" in done.stderr
        assert os.listdir(folder / "state/restores") == os.listdir(folder / "state/leases") == []


# ---- databases


@pytest.mark.needs("mariadbd")
def test_a_server_on_the_restored_datadir_has_all_that_was_acknowledged(other):
    with btrfs_scene() as scene:
        ctx = scene.context()
        with write_load(str(scene.server.socket), writers=3) as load:
            load.warm_up()
            before = load.acknowledged()
            manifest = backup(ctx, ctx.config.job("demo"))
            after = load.acknowledged()
        assert manifest.position is not None
        for dest in (Path(scene.file_system.point) / "new", other.point / "new"):
            document = scene.json("restore", "latest", str(dest))
            assert document["restored"]["leads"] == []
            with private_server(dest, document["restored"]["options"], install_options=None) as server:
                assert server.query("SELECT @@gtid_binlog_pos") == ((manifest.position.gtid,),)
                assert server.query("SELECT @@datadir") == ((f"{dest}/",),)
                with server.connect() as connection:
                    check_invariant(connection, before=before, after=after)
        subprocess.run(["rm", "-r", other.point / "new"], check=True)


@pytest.mark.needs("mariadbd")
def test_folders_elsewhere_get_folders_of_their_own_and_what_leads_back_is_named(other):
    with btrfs_scene(server=False) as scene:
        volume = Path(scene.file_system.point) / "mysql"
        for name in ("redo", "log", "tables"):
            (volume / name).mkdir(mode=0o777)
            (volume / name).chmod(0o777)
        options = [f"--innodb-log-group-home-dir={volume}/redo", f"--log-bin={volume}/log/binlog"]
        install = [f"--innodb-log-group-home-dir={volume}/redo"]
        with private_server(volume / "data", options, install_options=install) as server:
            scene._server = server
            scene.configure()
            server.query("CREATE DATABASE d")
            server.query(f"CREATE TABLE d.t (a INT) DATA DIRECTORY='{volume}/tables'")
            server.query("INSERT INTO d.t VALUES (1), (2)")
            assert scene.run("backup", "demo").returncode == 0
            dest = other.point / "several"
            done = scene.run("restore", "latest", str(dest))
            assert done.returncode == 0, done.stderr
            assert sorted(os.listdir(dest)) == ["d", "data", "log", "redo"]
            # The .isl file and the index of the binary logs name the live ones.
            assert f"{dest}/data/d/t.isl names {volume}/tables/d/t.ibd, where the source has it" in done.stderr
            assert f"{dest}/log/binlog.index names {volume}/log, where the source has it" in done.stderr
            assert "before a server starts on it" in done.stderr
            assert f"{volume}/redo -> {dest}/redo" in done.stdout
            line = next(line for line in done.stdout.splitlines() if "server options: " in line)
            given = shlex.split(line.partition("server options: ")[2])
            assert f"--innodb-log-group-home-dir={dest}/redo" in given
            assert f"--log-bin={dest}/log/binlog" in given
            assert "the redo log names the tablespaces elsewhere as well" in done.stderr
            subprocess.run(["rm", "-r", dest], check=True)
            # Without such tables the index is all that has to be changed: it then stands by itself.
            server.query("CREATE TABLE d.u SELECT * FROM d.t")
            server.query("DROP TABLE d.t")
            assert scene.run("backup", "demo").returncode == 0
            assert scene.run("restore", "latest", str(dest)).returncode == 0
            index = dest / "log/binlog.index"
            index.write_text(index.read_text().replace(f"{volume}/log", f"{dest}/log"))
            server.stop()
            (volume / "redo").rename(volume / "gone")
            with private_server(dest / "data", given, install_options=None) as restored:
                assert restored.query("SELECT * FROM d.u") == ((1,), (2,))
                assert restored.query("SELECT @@innodb_log_group_home_dir") == ((f"{dest}/redo",),)
        subprocess.run(["rm", "-r", dest], check=True)


@pytest.mark.needs("mariadbd", "xfs")
def test_a_set_of_two_volumes_becomes_one_folder():
    with (
        loop_filesystem("xfs", 512 << 20) as first,
        loop_filesystem("xfs", 512 << 20) as second,
        work_folder() as folder,
    ):
        redo = second.point / "redo"
        redo.mkdir()
        os.chown(redo, server_user().pw_uid, server_user().pw_gid)
        moved = (f"--innodb-log-group-home-dir={redo}", f"--innodb-undo-directory={redo}")
        install = (*moved, "--innodb-undo-tablespaces=2")
        with private_server(first.point / "data", (*SERVER_OPTIONS, *moved), install_options=install) as server:
            scene = Scene(first, folder, server)
            scene.configure('quiesce = "freeze-process"')
            ctx = scene.context()
            with write_load(str(server.socket), writers=3) as load:
                load.warm_up()
                before = load.acknowledged()
                manifest = backup(ctx, ctx.config.job("demo"))
                after = load.acknowledged()
            assert len(manifest.members) == 2
            assert manifest.position is not None
            # On the file system of one of them: that one's blocks are shared, the other one's are copied.
            dest = second.point / "new"
            document = scene.json("restore", "latest", str(dest))
            restored = document["restored"]
            assert sorted(os.listdir(dest)) == ["data", "redo"]
            assert restored["data_path"] == f"{dest}/data"
            assert document["places"] == [
                {"original": str(server.datadir), "path": f"{dest}/data"},
                {"original": str(redo), "path": f"{dest}/redo"},
            ]
            assert restored["shared_files"] >= 1
            assert restored["copied_files"] > restored["shared_files"]
            with private_server(dest / "data", restored["options"], install_options=None) as copy:
                assert copy.query("SELECT @@gtid_binlog_pos") == ((manifest.position.gtid,),)
                assert copy.query("SELECT @@innodb_undo_directory") == ((f"{dest}/redo",),)
                with copy.connect() as connection:
                    check_invariant(connection, before=before, after=after)
            prepared = scene.json("prepare", "latest")
            data = Path(prepared["mount"]["data_path"])
            there = data.parent / "redo"
            options = (f"--innodb-log-group-home-dir={there}", f"--innodb-undo-directory={there}")
            with private_server(data, (*SERVER_OPTIONS, *options), install_options=None) as copy:
                assert "crash recovery" not in copy.log_text()
                with copy.connect() as connection:
                    check_invariant(connection, before=before, after=after)
            assert scene.run("umount", "--all").returncode == 0
            _nothing_left(scene)
