"""What people and machines do to storage behind snapmgr's back: mounts, namespaces, odd names, renamed devices."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.backup.fire import fingerprint
from snapmgr.contract.errors import InUseError
from support import faults
from support.btrfs import run
from support.faults import Faults
from support.scene import Scene, btrfs_scene
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil")

_CHECK = '[job.demo.verify]\ncommand = ["/bin/cat", "{}/file"]\n'


@pytest.fixture
def scene() -> Iterator[Scene]:
    """A directory job whose source is a subvolume with one file."""
    with btrfs_scene(server=False) as made:
        (_source(made) / "file").write_text("content")
        made.configure(text=f'[job.demo]\nsource = "directory"\npath = "{_source(made)}"\n{_CHECK}')
        yield made


def _source(scene: Scene) -> Path:
    return Path(scene.file_system.point) / "mysql"


def _take(scene: Scene) -> str:
    done = scene.run("backup", "demo")
    assert done.returncode == 0, done.stderr
    return scene.entries()[-1].manifest.id


@contextmanager
def _other_namespace(*holding: str) -> Iterator[None]:
    """A mount namespace of its own, a copy of ours, for as long as the context lasts; its process runs `holding`."""
    with subprocess.Popen(["unshare", "--mount", *(holding or ("sleep", "60"))]) as process:
        ours = os.readlink("/proc/self/ns/mnt")
        while os.readlink(f"/proc/{process.pid}/ns/mnt") == ours:
            time.sleep(0.01)
        time.sleep(0.1)  # until `holding` has opened what it holds
        try:
            yield
        finally:
            process.kill()


# --------------------------------------------------------------------------------------------------------------- mounts


def test_a_refused_mount_leaves_somebodys_mount_there(scene: Scene) -> None:
    _take(scene)
    with work_folder() as folder:
        run("mount", "-t", "tmpfs", "tmpfs", folder)
        try:
            (folder / "theirs").touch()
            refused = scene.run("mount", "latest", str(folder))
            assert refused.returncode == 1
            assert "mounted at" in refused.stderr
            assert (folder / "theirs").exists()
        finally:
            run("umount", folder)
    assert scene.run("mount", "--list").stdout == ""


def test_a_mount_over_ours_after_it_was_unmounted_by_hand_stays(scene: Scene) -> None:
    _take(scene)
    with work_folder() as folder:
        assert scene.run("mount", "latest", str(folder)).returncode == 0
        run("umount", folder)
        run("mount", "-t", "tmpfs", "tmpfs", folder)
        try:
            (folder / "theirs").touch()
            assert scene.run("umount", str(folder)).returncode == 0
            assert (folder / "theirs").exists()
        finally:
            run("umount", folder)
    assert len(scene.stored()) == 1


def test_a_folder_that_somebody_named_is_there_after_umount(scene: Scene) -> None:
    _take(scene)
    with work_folder() as folder:
        assert scene.run("mount", "latest", str(folder)).returncode == 0
        assert scene.run("umount", str(folder)).returncode == 0
        assert folder.is_dir()


def test_scratch_mounts_are_not_made_where_others_could_exchange_them(scene: Scene) -> None:
    _take(scene)
    scene.scratch.mkdir()
    scene.scratch.chmod(0o777)
    refused = scene.run("verify", "latest")
    assert refused.returncode == 1
    assert "others could change" in refused.stderr
    scene.scratch.chmod(0o1777)
    assert scene.run("verify", "latest").returncode == 0


def test_nothing_is_left_of_a_clone_that_a_read_only_file_system_refused(scene: Scene) -> None:
    _take(scene)
    run("mount", "-o", "remount,ro", scene.file_system.point)
    try:
        assert "read-only" in scene.run("verify", "latest").stderr
        assert scene.run("mount", "--list").stdout == ""
    finally:
        run("mount", "-o", "remount,rw", scene.file_system.point)


def test_what_is_in_the_way_of_a_removal_does_not_stop_backups(scene: Scene) -> None:
    first = _take(scene)
    place = Path(scene.file_system.point, ".snapmgr", first)
    run("btrfs", "-q", "subvolume", "delete", place)
    place.mkdir()
    (place / "precious").touch()
    _take(scene)
    with scene.config_file.open("a") as file:
        file.write("[job.demo.retention]\nkeep-last = 1\n")
    for _ in range(2):
        pruned = scene.run("prune", "demo")
        assert pruned.returncode == 1
        assert first in pruned.stderr
        # The snapshot is taken; the exit code says that somebody has to look.
        assert scene.run("backup", "demo").returncode == 5
        assert scene.states()[-1] == "ready"
    assert (place / "precious").exists()


def test_subvolumes_in_a_clone_are_named_and_umount_works_after_their_removal(scene: Scene) -> None:
    _take(scene)
    point = Path(scene.run("mount", "latest").stdout.strip())
    run("btrfs", "-q", "subvolume", "create", point / "inner")
    refused = scene.run("umount", str(point))
    assert refused.returncode == 1
    assert "mount -o subvolid=5" in refused.stderr
    (clone,) = [name for name in scene.stored() if name.startswith("attach.") and "/" not in name]
    run("btrfs", "-q", "subvolume", "delete", Path(scene.file_system.point, ".snapmgr", clone, "inner"))
    assert scene.run("umount", str(point)).returncode == 0
    assert len(scene.stored()) == 1


# ----------------------------------------------------------------------------------------------------------- namespaces


def test_a_clone_that_another_namespace_merely_shows_is_removed(scene: Scene) -> None:
    _take(scene)
    point = scene.run("mount", "latest").stdout.strip()
    with _other_namespace():
        done = scene.run("umount", point)
        assert done.returncode == 0, done.stderr
    assert len(scene.stored()) == 1


def test_a_clone_that_is_used_in_another_namespace_stays(scene: Scene) -> None:
    _take(scene)
    point = scene.run("mount", "latest").stdout.strip()
    with _other_namespace("sh", "-c", f"exec sleep 60 <{point}/file"):
        refused = scene.run("umount", point)
        assert refused.returncode == 1
        assert "in the mount namespace of process" in refused.stderr
        assert len(scene.stored()) == 2
    assert scene.run("umount", point).returncode == 0


def test_a_snapshot_mounted_at_an_odd_name_in_another_namespace_is_in_use(scene: Scene) -> None:
    snapshot_id = _take(scene)
    ref = scene.entries()[0].manifest.members[0].ref
    with work_folder() as folder:
        point = folder / "a\rb\x0bc\u2028d\x85e"
        point.mkdir()
        run("mount", "-o", f"subvol=.snapmgr/{snapshot_id}", scene.file_system.device, point)
        with _other_namespace():
            run("umount", point)
            with pytest.raises(InUseError, match="namespace"):
                scene.context().backend("btrfs").delete(ref)


# --------------------------------------------------------------------------------------------------------- names, paths


def test_nested_names_that_are_not_utf8_are_in_the_manifest(scene: Scene) -> None:
    nested = os.fsencode(_source(scene)) + b"/not\xff\nutf8"
    subprocess.run(["btrfs", "-q", "subvolume", "create", nested], check=True)
    _take(scene)
    assert scene.entries()[0].manifest.excluded == (f"{_source(scene)}/not\\xff\nutf8",)
    assert scene.json("show", "latest")["snapshot"]["excluded"] == [f"{_source(scene)}/not\\xff\nutf8"]


def test_a_path_in_the_subvolume_that_is_not_utf8_is_refused(scene: Scene) -> None:
    inner = os.fsencode(_source(scene)) + b"/not\xff"
    os.mkdir(inner)
    (scene.folder / "link").symlink_to(os.fsdecode(inner))
    scene.configure(text=f'[job.demo]\nsource = "directory"\nbackend = "btrfs"\npath = "{scene.folder}/link"\n')
    refused = scene.run("backup", "demo")
    assert refused.returncode == 1
    assert "not UTF-8" in refused.stderr
    assert "bug" not in refused.stderr


def _dig(folder: Path, name: str, depth: int) -> None:
    fd = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir(name, dir_fd=fd)
        below = os.open(name, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)


def test_paths_longer_than_the_kernel_takes(scene: Scene) -> None:
    origin = Path(scene.file_system.point) / "plain"
    origin.mkdir()
    _dig(origin, "d" * 250, 30)
    scene.configure(text=f'[job.demo]\nsource = "directory"\nbackend = "reflink"\npath = "{origin}"\n')
    _take(scene)
    _take(scene)


def test_folders_nested_too_deep_for_a_copy_are_refused_and_do_not_hinder_btrfs(scene: Scene) -> None:
    _dig(_source(scene), "d", 700)
    _take(scene)
    scene.configure(text=f'[job.demo]\nsource = "directory"\nbackend = "reflink"\npath = "{_source(scene)}"\n')
    refused = scene.run("backup", "demo")
    assert refused.returncode == 1
    assert "nested more than" in refused.stderr
    assert "bug" not in refused.stderr


def test_a_file_that_vanishes_under_a_copy_is_a_change(scene: Scene) -> None:
    origin = Path(scene.file_system.point) / "plain"
    origin.mkdir()
    for number in range(3):
        (origin / f"file{number}").write_text("content" * 1000)
    scene.configure(text=f'[job.demo]\nsource = "directory"\nbackend = "reflink"\npath = "{origin}"\n')
    mark = scene.folder / "mark"
    with scene.start("backup", "demo", faults_=Faults(delay_s=0.5, delay_mark=mark)) as process:
        # The first delay is the trial clone in `arm`; the second is the copy of the first file.
        while process.poll() is None and not mark.exists():
            time.sleep(0.01)
        mark.unlink()
        while process.poll() is None and not mark.exists():
            time.sleep(0.01)
        for file in origin.iterdir():
            file.unlink()
        _, err = process.communicate(timeout=60)
    assert process.returncode == 4, err
    assert os.listdir(Path(scene.file_system.point) / ".snapmgr-reflink") == ["snapmgr-reflink-store.json"]


def test_a_fingerprint_tells_a_file_in_a_folder_from_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    before = fingerprint(str(tmp_path))
    assert fingerprint(str(tmp_path)) == before
    (tmp_path / "folder" / "new").touch()
    assert fingerprint(str(tmp_path)) != before


# -------------------------------------------------------------------------------------------------------------- devices


def test_two_devices_that_the_kernel_was_not_told_of(tmp_path: Path) -> None:
    """Attached anew under other names, without udev: `blkid` finds both, and the mount names both."""
    with work_folder() as folder:
        images = [folder / "one", folder / "two"]
        for image in images:
            with image.open("wb") as file:
                file.truncate(300 << 20)
        point, source = folder / "mnt", folder / "mnt" / "source"
        point.mkdir()
        config = tmp_path / "snapmgr.toml"
        config.write_text(
            f'state_dir = "{tmp_path}/state"\nscratch_dir = "{tmp_path}/scratch"\n'
            f'[job.demo]\nsource = "directory"\npath = "{source}"\n{_CHECK}'
        )
        devices = [run("losetup", "--find", "--show", image).strip() for image in images]
        try:
            run("mkfs.btrfs", "--quiet", "--force", "--data", "raid0", "--metadata", "raid1", *devices)
            run("mount", devices[0], point)
            run("btrfs", "-q", "subvolume", "create", source)
            (source / "file").write_text("content")
            assert faults.run(config, "backup", "demo").returncode == 0
            run("umount", point)
            for device in devices:
                run("losetup", "--detach", device)
            run("btrfs", "device", "scan", "--forget")
            devices = [run("losetup", "--find", "--show", image).strip() for image in reversed(images)]
            done = faults.run(config, "verify", "latest")
            assert done.returncode == 0, done.stderr
        finally:
            subprocess.run(["umount", point], check=False, stderr=subprocess.DEVNULL)
            for device in devices:
                run("losetup", "--detach", device)
