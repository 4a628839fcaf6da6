"""Preparing a backup folder: every way gives the same tables, and what is cut short leaves nothing."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from snapmgr.contract.errors import NotFoundError, StorageError
from snapmgr.system.blockdev import read_mounts
from snapmgr.system.command import CommandRunner
from snapmgr.system.mount import KernelMounter
from snapmgr_reflink import ReflinkBackend
from snapmgr_reflink.backend import ReflinkConfig
from support.backupfolder import checksums, loaded_backup
from support.juicefs import juicefs_volume
from support.server import private_server, server_user
from support.storage import loop_filesystem, work_folder
from support.thoroughness import CAMPAIGN

pytestmark = pytest.mark.needs("root", "loop", "xfs", "mariadbd", "mariadb-backup")

CLI = Path(sys.executable).with_name("snapmgr")
# The command line with something that happens at a step: argv is the code, then the arguments.
PATCHED = """
import os, signal, sys
import snapmgr.physical.prepare.run as preparing
def at(name, number, *, after=True):
    old = getattr(preparing, name)
    def new(*arguments, **named):
        if not after: os.kill(os.getpid(), number)
        made = old(*arguments, **named)
        if after: os.kill(os.getpid(), number)
        return made
    setattr(preparing, name, new)
exec(sys.argv.pop(1))
from snapmgr.cli.main import main
sys.exit(main())
"""


@pytest.fixture(scope="module")
def shared():
    with (
        loop_filesystem("xfs", 900 << 20) as system,
        work_folder() as work,
        loaded_backup(system.point, work) as made,
    ):
        yield SimpleNamespace(point=system.point, work=work, full=made.full, tables=made.tables)


@pytest.fixture
def site(shared):
    """The backup, a fresh scratch folder, and whether anything is left at the end."""
    shared.scratch = shared.work / f"scratch-{time.monotonic_ns()}"
    before = _fingerprint(shared.full)
    yield shared
    assert _fingerprint(shared.full) == before
    for folder in (shared.point, shared.scratch):
        for path in folder.iterdir() if folder.exists() else ():
            if path != shared.full:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _fingerprint(folder):
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.stat().st_uid,
            hashlib.blake2b(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in folder.rglob("*")
    }


def _run(*arguments, code=0):
    done = subprocess.run(
        [CLI, "prepare", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=100
    )
    assert done.returncode == code, done.stderr
    return done


def _patched(patch, *arguments):
    return subprocess.run(
        [sys.executable, "-c", PATCHED, patch, "prepare", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def _hidden(site):
    return [
        path.name
        for folder in (site.point, site.scratch)
        if folder.exists()
        for path in folder.iterdir()
        if path.name.startswith(".")
    ]


def _is_whole(site, path):
    user = server_user()
    owners = {(one.stat().st_uid, one.stat().st_gid) for one in (path, *path.rglob("*"))}
    assert owners == {(user.pw_uid, user.pw_gid)}
    assert path.stat().st_mode == site.full.stat().st_mode
    assert checksums(path) == site.tables
    assert _hidden(site) == []
    assert not [mount.point for mount in read_mounts() if mount.point.startswith(f"{site.scratch}/")]


@pytest.mark.parametrize(
    ("options", "where", "way"),
    [
        (["--strategy", "storage"], "point/full.prepared", "storage"),
        (["--strategy", "scratch"], "scratch/full.prepared", "scratch"),
        (["--strategy", "scratch", "--result", "storage"], "point/full.prepared", "scratch"),
        (["--strategy", "overlay", "--use-memory", "64M"], "point/full.prepared", "overlay"),
    ],
)
def test_every_way_gives_the_same_tables(site, options, where, way):
    document = json.loads(_run(site.full, "--scratch", site.scratch, *options, "--json").stdout)
    prepared = document["prepared"]
    top, _, name = where.partition("/")
    assert prepared["path"] == str(getattr(site, top) / name)
    assert (prepared["way"], prepared["result"]) == (way, "storage" if top == "point" else "scratch")
    assert document["plan"]["redo_bytes"] > 1 << 20
    if prepared["written_back_bytes"] is not None:
        assert 0 < prepared["written_back_bytes"] <= document["plan"]["data_bytes"]
    _is_whole(site, Path(prepared["path"]))


def test_auto_to_a_folder_of_ones_choice(site):
    planned = _run(site.full, site.work / "ready", "--scratch", site.scratch, "--dry-run").stdout
    assert f"would prepare {site.full} (mariadb-backup) to {site.work}/ready" in planned
    assert "its result stays in the storage" in planned
    assert "scratch space: " in planned
    assert not site.scratch.exists()
    done = _run(site.full, site.work / "ready", "--scratch", site.scratch)
    assert done.stdout == f"{site.work}/ready\n"
    assert "copied to scratch; not on a clone in the storage" in done.stderr
    assert not [name for name in os.listdir(site.work) if name.startswith(".snapmgr")]
    shutil.rmtree(site.work / "ready")


def _only_checkpoints(folder, **changes):
    path = folder / "xtrabackup_checkpoints"
    lines = dict(line.split(" = ") for line in path.read_text().splitlines())
    path.write_text("".join(f"{name} = {value}\n" for name, value in (lines | changes).items()))


def _unfinished(folder):
    (folder / "xtrabackup_checkpoints").unlink()


def _emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def _of_another_version(folder):
    path = folder / "xtrabackup_info"
    path.write_text(path.read_text().replace("10.11.", "10.4."))


@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        (_emptied, 1, "is not a physical backup"),
        (_unfinished, 1, ""),
        (lambda folder: _only_checkpoints(folder, backup_type="incremental", from_lsn="4711"), 2, "is an increment"),
        (lambda folder: _only_checkpoints(folder, backup_type="full-prepared"), 2, "is prepared already"),
        (_of_another_version, 7, ""),
    ],
)
def test_what_cannot_be_prepared_is_refused(site, change, code, said):
    odd = site.point / "odd"
    subprocess.run(["cp", "-a", "--reflink=always", site.full, odd], check=True)
    change(odd)
    before = sorted(os.listdir(site.point))
    done = _run(odd, "--scratch", site.scratch, "--result", "storage", code=code)
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert done.stdout == ""
    assert sorted(os.listdir(site.point)) == before
    assert not site.scratch.exists() or os.listdir(site.scratch) == []


def test_nothing_is_overwritten(site):
    (site.point / "full.prepared").mkdir()
    done = _run(site.full, site.point / "full.prepared", "--scratch", site.scratch, code=2)
    assert "full.prepared exists" in done.stderr
    done = _run(site.full, "--scratch", site.scratch, "--result", "storage")
    assert done.stdout == f"{site.point}/full.prepared-2\n"
    assert os.listdir(site.point / "full.prepared") == []


def test_a_server_on_it_is_noticed(site):
    done = _run(site.full, site.point / "used", "--scratch", site.scratch)
    used = Path(done.stdout.strip())
    with private_server(used, install_options=None) as server:
        # As if it were a backup still.
        _only_checkpoints(used, backup_type="full-backuped")
        refused = _run(used, "--scratch", site.scratch, code=1)
        assert f"pid {server.pid}) runs on {used}" in refused.stderr


STEPS = [
    ("scratch", 'at("copy_to_scratch", KILL)'),
    ("scratch", 'at("apply_in_place", KILL)'),
    ("scratch", 'at("write_back", KILL)'),
    ("storage", 'at("take_owners", KILL)'),
    ("overlay", 'at("copied_up", KILL)'),
]


@pytest.mark.parametrize(("strategy", "step"), STEPS if CAMPAIGN else STEPS[2::2])
def test_what_was_killed_is_removed_by_the_next_one(site, strategy, step):
    arguments = [site.full, "--scratch", site.scratch, "--strategy", strategy, "--result", "storage"]
    killed = _patched(step.replace("KILL", "signal.SIGKILL"), *arguments)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert _hidden(site)
    assert not (site.point / "full.prepared").exists()
    done = _run(*arguments)
    assert "removing what a killed prepare left" in done.stderr
    assert done.stdout == f"{site.point}/full.prepared\n"
    assert _hidden(site) == []
    assert not [mount.point for mount in read_mounts() if mount.point.startswith(f"{site.scratch}/")]


@pytest.mark.parametrize(("strategy", "step"), STEPS[1:2])
def test_what_is_interrupted_leaves_nothing(site, strategy, step):
    ended = _patched(
        step.replace("KILL", "signal.SIGINT"),
        site.full,
        "--scratch",
        site.scratch,
        "--strategy",
        strategy,
        "--result",
        "storage",
    )
    assert ended.returncode == 130, ended.stderr
    assert ended.stdout == ""
    assert os.listdir(site.point) == ["full"]
    assert os.listdir(site.scratch) == []


def test_two_at_once(site):
    first = f'preparing.apply_in_place = lambda *_a, **_n: (open("{site.work}/at", "w").close(), signal.pause())'
    arguments = [site.full, "--scratch", site.scratch, "--strategy", "scratch"]
    with subprocess.Popen([sys.executable, "-c", PATCHED, first, "prepare", *map(str, arguments)]) as process:
        deadline = time.monotonic() + 60
        while not (site.work / "at").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        refused = _run(*arguments, code=3)
        assert "another prepare of" in refused.stderr
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 130
    assert os.listdir(site.scratch) == []


def test_a_full_scratch_disk_leaves_nothing(site):
    with loop_filesystem("ext4", 40 << 20) as small:
        wanted = _run(site.full, "--scratch", small.point, "--strategy", "scratch", code=1)
        assert "of scratch space are needed" in wanted.stderr
        lied = _patched(
            "preparing.free_bytes = lambda folder: 1 << 40",
            site.full,
            "--scratch",
            small.point,
            "--strategy",
            "scratch",
        )
        assert lied.returncode == 1
        assert "no space left for" in lied.stderr
        assert os.listdir(small.point) == ["lost+found"]


def test_a_tool_that_fails_leaves_its_log_only(site):
    failed = _run(
        site.full, "--scratch", site.scratch, "--strategy", "scratch", "--tool-option=--no-such-option", code=1
    )
    (log,) = site.scratch.iterdir()
    assert log.name.startswith("snapmgr-prepare-")
    assert str(log) in failed.stderr
    assert "no-such-option" in log.read_text()
    assert os.listdir(site.point) == ["full"]


@pytest.fixture(scope="module")
def volume(shared):
    """A JuiceFS volume that holds the backup."""
    with juicefs_volume("sqlite") as made:
        subprocess.run(["cp", "-a", shared.full, made.point / "full"], check=True)
        made.configuration = made.folder / "snapmgr.toml"
        made.configuration.write_text(
            f'state_dir = "{made.folder}/state"\nscratch_dir = "{made.folder}/scratch"\n'
            f'[backend.juicefs]\nmeta_url = "{made.meta_url}"\n'
        )
        yield made


@pytest.mark.needs("juicefs")
@pytest.mark.parametrize(
    ("options", "way"),
    [
        (["--strategy", "storage", "--tool-option=--innodb-flush-method=fsync"], "storage"),
        (
            ["--mount-option", "writeback", "--mount-option", "upload-delay=1h", "--mount-option", "warm-up"],
            "writeback",
        ),
        (["--strategy", "scratch", "--result", "storage"], "scratch"),
    ],
)
def test_on_juicefs(shared, volume, options, way):
    before = _fingerprint(volume.point / "full")
    done = subprocess.run(
        [CLI, "-c", volume.configuration, "prepare", volume.point / "full", *options, "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    prepared = json.loads(done.stdout)["prepared"]
    path = Path(prepared["path"])
    assert (prepared["way"], path) == (way, volume.point / "full.prepared")
    assert checksums(path) == shared.tables
    assert _fingerprint(volume.point / "full") == before
    shutil.rmtree(path)
    assert [name for name in os.listdir(volume.point) if name.startswith(".snapmgr")] == []
    assert os.listdir(volume.folder / "scratch") == []
    assert volume.counter("juicefs_staging_block_bytes") == 0
    # No private mount is left: one at most of this volume.
    assert [one.point for one in read_mounts() if one.source == f"JuiceFS:{volume.name}"] == [str(volume.point)]


@pytest.mark.needs("btrfs")
@pytest.mark.parametrize("fs_type", ["xfs", "btrfs"])
def test_folders_are_cloned_with_shared_blocks(fs_type):
    backend = ReflinkBackend(ReflinkConfig(), CommandRunner(), KernelMounter())
    with loop_filesystem(fs_type, 400 << 20) as system:
        source, target = system.point / "a", system.point / "b"
        (source / "in").mkdir(parents=True)
        (source / "in" / "file").write_bytes(os.urandom(64 << 20))
        (source / "in" / "file").chmod(0o640)
        (source / "to").symlink_to("in")
        subprocess.run(["sync", "-f", source], check=True)
        free = os.statvfs(system.point).f_bfree
        # What a killed one left.
        (system.point / ".snapmgr-clone-3e23e8160039594a" / "half").mkdir(parents=True)
        backend.clone_folder(str(source), str(target))
        subprocess.run(["sync", "-f", source], check=True)
        assert (free - os.statvfs(system.point).f_bfree) * 4096 < 32 << 20
        assert _fingerprint(target) == _fingerprint(source)
        assert sorted(os.listdir(system.point)) == ["a", "b"]
        with pytest.raises(StorageError, match="exists already"):
            backend.clone_folder(str(source), str(target))
        with pytest.raises(NotFoundError):
            backend.clone_folder(str(system.point / "none"), str(system.point / "c"))
