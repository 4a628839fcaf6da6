"""Restoring to a folder of its own: what a directory holds is kept, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from snapmgr.catalog.store import Catalog
from snapmgr.contract.errors import StorageError
from snapmgr.restore import copy as restore_copy
from snapmgr.restore.run import restore
from snapmgr.system import probe
from snapmgr.system.kernel import is_nocow
from snapmgr.testing import trees
from snapmgr.tree.copy import TreeCopy
from support.restored import require_nothing_left
from support.server import server_user
from support.storage import loop_filesystem, work_folder

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "ext4")


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
    require_nothing_left(files)
    subprocess.run(["rm", "-r", dest], check=True)


def test_blocks_are_shared_on_the_same_file_system(files):
    dest = Path(files.file_system.point) / "copy"
    dest.mkdir()
    document = files.json("restore", "latest", str(dest))
    trees.same(trees.fingerprint(files.data), trees.fingerprint(dest))
    assert document["restored"]["copied_files"] == 0
    assert document["restored"]["shared_files"] > 10
    require_nothing_left(files)


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
        assert document["restored"]["external_paths"] == [
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
        "external_paths",
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
        ("file", "is not a folder"),
        ("no/such", "is not an existing folder"),
        ("state/x", "is in the state directory"),
        ("scratch/x", "is in the scratch directory"),
        ("in the source", "is in the source"),
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
    require_nothing_left(files)


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
        assert "plain lacks the extended attribute user." in (poor / "x" / restore_copy.DIFFERS_FILE).read_text()
        assert (poor / "x" / "plain").read_bytes() == (files.data / "plain").read_bytes()
    finally:
        subprocess.run(["umount", poor], check=True)


@pytest.mark.needs("btrfs")
@pytest.mark.parametrize("share", [True, False])
def test_nocow_is_kept_file_by_file(share):
    with loop_filesystem("btrfs", 120 << 20) as system:
        source, copy = system.point / "source", system.point / "copy"
        for folder in (source, source / "nocow", copy):
            folder.mkdir()
        subprocess.run(["chattr", "+C", source / "nocow"], check=True)
        wanted = {"a-cow": False, "b-nocow": True, "c-empty-nocow": True, "d-cow": False}
        for name, nocow in wanted.items():
            with (source / ("nocow/x" if nocow else "x")).open("wb") as file:
                file.write(b"" if "empty" in name else b"x" * 9000)
            (source / ("nocow/x" if nocow else "x")).rename(source / name)
            (source / ("x" if nocow else "nocow/x")).write_bytes(b"y" * 9000)
            (source / ("x" if nocow else "nocow/x")).rename(source / "nocow" / name)
        with ExitStack() as stack:
            fds = [os.open(folder, os.O_RDONLY) for folder in (source, copy)]
            for fd in fds:
                stack.callback(os.close, fd)
            made = TreeCopy(share=share, progress=lambda _done: None)
            made.run(*fds)
        assert (made.differences, made.tally.copied_files) == ([], 0 if share else 7)
        trees.same(trees.fingerprint(source), trees.fingerprint(copy))
        for root in (source, copy):
            assert {name: _is_nocow(root / name) for name in wanted} == wanted
            assert {name: not _is_nocow(root / "nocow" / name) for name in wanted} == wanted


def _is_nocow(path):
    fd = os.open(path, os.O_RDONLY)
    try:
        return is_nocow(fd)
    finally:
        os.close(fd)


@pytest.mark.needs("xfs")
def test_somebody_who_is_not_root_restores_his_own():
    with loop_filesystem("xfs", 320 << 20) as system, work_folder() as folder:
        data = system.point / "files"
        (data / "closed").mkdir(parents=True)
        (data / "closed/file").write_text("x" * 9000)
        (data / "open").write_text("y" * 9000)
        os.link(data / "open", data / "closed/again")
        (data / "closed").chmod(0o555)
        data.chmod(0o500)
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
            assert dest.stat().st_mode == data.stat().st_mode
            assert sorted(os.listdir(dest)) == ["closed", "open"]
        done = run("restore", "latest", "/usr/not-allowed")
        assert done.returncode == 7
        assert "no permission to write to /usr/not-allowed" in done.stderr
        assert os.listdir(folder / "state/restores") == os.listdir(folder / "state/leases") == []
