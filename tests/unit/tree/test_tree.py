"""Trees: what was copied is what was there, whatever it is; what is not is named; what is removed is gone."""

from __future__ import annotations

import errno
import os
import random
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from snapmgr.contract.errors import StorageError
from snapmgr.system import kernel
from snapmgr.testing import trees
from snapmgr.tree import copy as copying
from snapmgr.tree import entries
from snapmgr.tree.attributes import Handle, keep
from snapmgr.tree.compare import compare
from snapmgr.tree.copy import TreeCopy, leads_out
from snapmgr.tree.overlay import has_marks
from snapmgr.tree.survey import count_entries, survey
from snapmgr.tree.walk import deep_trees, remove, walk


def _folder(path):
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


class _Pair:
    """A source and a copy, open."""

    def __init__(self, base):
        self.source, self.copy = base / "source", base / "copy"
        self.source.mkdir()
        self.copy.mkdir()
        self.done = []
        self.found = []

    def run(self):
        source, copy = _folder(self.source), _folder(self.copy)
        try:
            made = TreeCopy(share=False, progress=self.done.append)
            made.run(source, copy)
            self.found = made.differences
            return made.tally
        finally:
            os.close(source)
            os.close(copy)

    def differences(self, contents=None, apart=()):
        class Everything:
            def __contains__(self, _inode):
                return True

        source, copy = _folder(self.source), _folder(self.copy)
        try:
            return list(compare(source, copy, contents=contents or Everything(), apart=apart))
        finally:
            os.close(source)
            os.close(copy)


@pytest.fixture(name="pair")
def _pair(tmp_path):
    return _Pair(tmp_path)


def test_everything_that_a_file_system_can_hold_is_copied(pair):
    trees.plant(pair.source)
    tally = pair.run()
    trees.same(trees.fingerprint(pair.source), trees.fingerprint(pair.copy))
    assert pair.found + pair.differences() == []
    assert sum(pair.done) == tally.copied_bytes
    assert (tally.links, tally.shared_files) == (3, 0)
    # The hole is one in the copy too.
    assert (pair.copy / "sparse").stat().st_blocks * 512 < trees.HOLE_BYTES // 4
    assert tally.copied_bytes < trees.HOLE_BYTES // 2 < tally.size_bytes
    assert tally.inodes == {
        entry.stat().st_ino
        for entry in pair.copy.rglob("*")
        if entry.is_file() and not entry.is_symlink() and entry.stat().st_size
    }


_NAME = st.binary(min_size=1, max_size=12).filter(lambda name: not set(name) & {0, 47} and name not in (b".", b".."))
_LEAF = st.one_of(
    st.tuples(
        st.just("file"), st.binary(max_size=40), st.integers(0, 3 << 16), st.sampled_from([0o600, 0o4755, 0o444])
    ),
    st.tuples(st.just("link"), _NAME),
    st.tuples(st.just("fifo")),
    st.tuples(st.just("again"), st.integers(0, 20)),
)
_TREE = st.recursive(
    st.dictionaries(_NAME, _LEAF, max_size=4),
    lambda children: st.dictionaries(_NAME, st.one_of(_LEAF, children), max_size=4),
    max_leaves=25,
)


def _grow(folder, tree, files):
    for name, what in tree.items():
        path = os.path.join(folder, name)
        if isinstance(what, dict):
            os.mkdir(path)
            _grow(path, what, files)
            os.utime(path, ns=(len(name), 10**18 + len(name)))
        elif what[0] == "file":
            with open(path, "wb") as file:
                file.write(what[1])
                file.seek(what[2], os.SEEK_CUR)
                file.write(what[1])
            os.chmod(path, what[3])
            os.utime(path, ns=(1, 10**18 + what[2]))
            files.append(path)
        elif what[0] == "link":
            os.symlink(what[1], path)
            files.append(path)
        elif what[0] == "fifo":
            os.mkfifo(path)
        elif files:
            os.link(files[what[1] % len(files)], path, follow_symlinks=False)


@settings(max_examples=60)
@given(tree=_TREE)
def test_any_tree_is_copied(tree, tmp_path_factory):
    pair = _Pair(tmp_path_factory.mktemp("tree"))
    _grow(os.fsencode(pair.source), tree, [])
    before = trees.fingerprint(pair.source)
    pair.run()
    trees.same(before, trees.fingerprint(pair.copy))
    trees.same(before, trees.fingerprint(pair.source))
    assert pair.found + pair.differences() == []
    parent = _folder(pair.copy.parent)
    try:
        remove(parent, "copy")
        remove(parent, "copy")
    finally:
        os.close(parent)
    assert not pair.copy.exists()
    trees.same(before, trees.fingerprint(pair.source))


def _flip(path):
    info = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))


def _truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def _unlink_and_remake(path):
    data, info = path.read_bytes(), path.stat()
    path.unlink()
    path.write_bytes(data)
    path.chmod(info.st_mode)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))
    os.setxattr(path, "user.snapmgr-test", bytes(range(256)))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("folder/deeper/third-name", _unlink_and_remake, "not one file with its other names"),
        ("plain", _flip, "plain has other contents"),
        ("plain", _truncate, "bytes, not 300001"),
        ("plain", lambda path: path.chmod(0o600), "plain has mode 0600, not 0644"),
        ("read-only", lambda path: os.utime(path, ns=(0, 5)), "has the modification time 5 ns"),
        ("plain", lambda path: os.removexattr(path, "user.snapmgr-test"), "plain lacks the extended attribute user."),
        ("plain", lambda path: os.setxattr(path, "user.snapmgr-test", b""), "plain has another value of"),
        ("empty", lambda path: os.setxattr(path, "user.more", b"1"), "empty should not have the extended attribute"),
        ("set-user-id", lambda path: path.unlink(), "set-user-id is missing"),
        ("empty-folder", lambda path: path.rmdir(), "empty-folder is missing"),
        ("empty-folder", lambda path: (path / "more").touch(), "empty-folder/more should not be there"),
        ("link", lambda path: (path.unlink(), path.symlink_to("elsewhere")), "link leads to elsewhere, not to plain"),
        ("fifo", lambda path: (path.unlink(), path.touch()), "fifo is a file, not a FIFO"),
        ("set-user-id", lambda path: (path.unlink(), path.mkdir()), "set-user-id is a folder, not a file"),
        ("empty-folder", lambda path: (path.rmdir(), path.touch()), "empty-folder is missing"),
    ],
)
def test_a_difference_is_named(pair, name, change, said):
    trees.plant(pair.source)
    pair.run()
    change(pair.copy / name)
    found = pair.differences()
    assert [text for text in found if said in text], found


@pytest.mark.needs("root")
def test_another_owner_is_named(pair):
    (pair.source / "file").touch()
    pair.run()
    os.chown(pair.copy / "file", 1, 2)
    assert pair.differences() == ["file belongs to 1:2, not to 0:0"]


def test_contents_are_compared_only_where_asked(pair):
    (pair.source / "file").write_bytes(b"abc")
    pair.run()
    _flip(pair.copy / "file")
    assert pair.differences(contents={-1}) == []
    assert pair.differences() == ["file has other contents"]


@pytest.mark.parametrize("position", [0, 5_000_000, 9_999_999])
def test_a_byte_in_what_was_a_hole_is_found(pair, position):
    for folder in (pair.source, pair.copy):
        with open(folder / "file", "wb") as file:
            file.truncate(10_000_000)
    with open(pair.copy / "file", "r+b") as file:
        file.seek(position)
        file.write(b"x")
    for folder in (pair.source, pair.copy):
        os.utime(folder / "file", ns=(0, 0))
        os.utime(folder, ns=(0, 0))
    assert pair.differences() == ["file has other contents"]


def test_names_longer_than_a_path_may_be(pair):
    fd = _folder(pair.source)
    fds = [fd]
    for number in range(30):
        name = f"{number:02}" + "x" * 250
        os.mkdir(name, dir_fd=fds[-1])
        fds.append(os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fds[-1]))
    leaf = os.open("leaf", os.O_WRONLY | os.O_CREAT, 0o640, dir_fd=fds[-1])
    os.write(leaf, b"deep down")
    os.close(leaf)
    # A second name of it: linking must reach the first one through a path longer than any call takes.
    os.link("leaf", "zz", src_dir_fd=fds[-1], dst_dir_fd=fds[0])
    os.link("leaf", "zzz", src_dir_fd=fds[-1], dst_dir_fd=fds[-1])
    for one in fds:
        os.close(one)
    tally = pair.run()
    assert (tally.folders, tally.files, tally.links) == (30, 1, 2)
    assert pair.differences() == []
    parent = _folder(pair.copy.parent)
    for name in ("source", "copy"):
        remove(parent, name)
    os.close(parent)
    assert not pair.source.exists()
    assert not pair.copy.exists()


def test_a_tree_deeper_than_pythons_stack(pair):
    fd = _folder(pair.source)
    for _ in range(1500):
        os.mkdir("d", dir_fd=fd)
        following = os.open("d", os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = following
    os.close(fd)
    with deep_trees():
        assert pair.run().folders == 1500
        assert pair.differences() == []
        parent = _folder(pair.copy.parent)
        remove(parent, "source")
        remove(parent, "copy")
        os.close(parent)


def test_attributes_inherited_from_the_folder_do_not_stay(pair):
    # As a file in a folder with a default ACL.
    (pair.source / "file").touch()
    (pair.copy / "file").touch()
    os.setxattr(pair.copy / "file", "user.inherited", b"x")
    source, copy = os.open(pair.source / "file", os.O_RDONLY), os.open(pair.copy / "file", os.O_RDONLY)
    keep(Handle(source), Handle(copy))
    os.close(source)
    os.close(copy)
    assert os.listxattr(pair.copy / "file") == []


@pytest.mark.needs("root")
def test_a_group_inherited_from_the_folder_does_not_stay(pair):
    (pair.source / "file").write_bytes(b"x")
    (pair.source / "file").chmod(0o666)
    (pair.source / "folder").mkdir()
    (pair.source / "folder" / "file").write_bytes(b"x")
    os.chown(pair.copy, -1, 12)
    pair.copy.chmod(0o2700)
    umask = os.umask(0o027)
    try:
        pair.run()
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(umask)
    assert pair.found == []
    for name, mode in (("file", 0o666), ("folder/file", 0o644)):
        made = (pair.copy / name).stat()
        assert (made.st_gid, made.st_mode & 0o7777) == (os.getegid(), mode)


@pytest.mark.parametrize(("code", "marks"), [(errno.E2BIG, True), (errno.EOPNOTSUPP, False)])
def test_attributes_that_cannot_be_read_may_be_those_of_an_overlay(monkeypatch, code, marks):
    def refuse(*_arguments, **_options):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "listxattr", refuse)
    assert has_marks("/file") is marks


@pytest.mark.parametrize("alone", [True, False])
def test_what_another_thread_starts_does_not_get_a_loose_umask(pair, monkeypatch, alone):
    (pair.source / "file").write_bytes(b"x")
    (pair.source / "file").chmod(0o666)
    seen = set()
    is_nocow = kernel.is_nocow

    def look(fd):
        seen.update(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("Umask"))
        return is_nocow(fd)

    monkeypatch.setattr(kernel, "is_nocow", look)
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    umask = os.umask(0o022)
    try:
        if not alone:
            other.start()
        pair.run()
    finally:
        os.umask(umask)
        ended.set()
    assert seen == {"Umask:\t0000" if alone else "Umask:\t0022"}
    assert (pair.copy / "file").stat().st_mode & 0o777 == 0o666


def test_a_full_disk_is_said_to_be_full(pair, monkeypatch):
    (pair.source / "file").write_bytes(b"x" * 100)

    def full(*_arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "sendfile", full)
    with pytest.raises(StorageError, match="no space left for file") as caught:
        pair.run()
    assert caught.value.hint


def test_an_exchanged_file_is_refused(pair, monkeypatch):
    (pair.source / "file").write_bytes(b"x")
    (pair.source / "other").write_bytes(b"y")
    opened = os.open
    monkeypatch.setattr(
        os,
        "open",
        lambda name, flags, *rest, **more: opened(
            "other" if name == "file" and not flags & os.O_CREAT else name, flags, *rest, **more
        ),
    )
    with pytest.raises(StorageError, match="file changed while it was copied"):
        pair.run()


def test_inode_numbers_of_the_folder_may_be_others(pair, monkeypatch):
    trees.plant(pair.source)
    listed = entries.entries
    monkeypatch.setattr(entries, "entries", lambda fd: [replace(one, inode=one.inode + 1) for one in listed(fd)])
    pair.run()
    monkeypatch.undo()
    trees.same(trees.fingerprint(pair.source), trees.fingerprint(pair.copy))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("utime", "file has the modification time"),
        ("fchmod", "file has mode 0644, not 0444"),
        ("setxattr", "file lacks the extended attribute user.snapmgr-test"),
        pytest.param("fchown", "file belongs to 0:0, not to 1:2", marks=pytest.mark.needs("root")),
    ],
)
def test_what_the_file_system_did_not_keep_is_named(pair, monkeypatch, call, said):
    # Each call succeeds and does nothing: the kernel is asked afterwards what the copy has.
    (pair.source / "file").write_bytes(b"x")
    os.setxattr(pair.source / "file", "user.snapmgr-test", b"1")
    if os.geteuid() == 0:
        os.chown(pair.source / "file", 1, 2)
    (pair.source / "file").chmod(0o444)
    os.utime(pair.source / "file", ns=(5, 5))
    pair.run()
    assert pair.found == []
    (pair.copy / "file").unlink()
    monkeypatch.setattr(os, call, lambda *_arguments, **_more: None)
    pair.run()
    (found,) = pair.found
    assert found.startswith(said)


def test_a_hard_link_that_is_another_file_is_named(pair, monkeypatch):
    (pair.source / "a").write_bytes(b"x")
    os.link(pair.source / "a", pair.source / "b")
    monkeypatch.setattr(os, "link", lambda _first, name, **_more: (pair.copy / name).write_bytes(b"x"))
    pair.run()
    assert [text.partition(" ")[2] for text in pair.found] == ["is not one file with its other names"]


def test_progress_of_a_sharing_copy_counts_entries(pair, monkeypatch):
    # One of them cannot share its blocks.
    for number in range(3):
        (pair.source / str(number)).write_bytes(b"x" * 100)
    shared = iter([True, False, True])
    monkeypatch.setattr(copying.kernel, "try_clone_file", lambda _source, _copy: next(shared))
    source, copy = _folder(pair.source), _folder(pair.copy)
    made = TreeCopy(share=True, progress=pair.done.append)
    made.run(source, copy)
    os.close(source)
    os.close(copy)
    assert sum(pair.done) == 3
    assert (made.tally.shared_files, made.tally.copied_files, len(made.tally.inodes)) == (2, 1, 1)
    # What claimed to be a clone is empty.
    assert [text.partition(" ")[2] for text in made.differences] == ["has 0 bytes, not 100"] * 2


def test_differences_have_a_limit(pair, monkeypatch):
    for number in range(5):
        (pair.source / str(number)).touch()
        os.utime(pair.source / str(number), ns=(5, 5))
    monkeypatch.setattr(os, "utime", lambda *_arguments, **_more: None)
    monkeypatch.setattr(copying, "DIFFERENCES_KEPT", 2)
    pair.run()
    assert len(pair.found) == 3


def test_a_survey_counts_hard_links_once_and_no_holes(pair):
    noise = random.Random(1).randbytes(65536)
    (pair.source / "a").write_bytes(noise)
    os.link(pair.source / "a", pair.source / "b")
    (pair.source / "folder").mkdir()
    with open(pair.source / "folder/sparse", "wb") as file:
        file.truncate(1 << 30)
    trees.flush(pair.source)
    fd = _folder(pair.source)
    seen, count = survey(fd), count_entries(fd)
    os.close(fd)
    assert seen.entries == count == 4
    assert seen.allocated_bytes == 65536


def test_a_walk_enters_and_leaves_each_folder_and_no_symlink(pair):
    (pair.source / "a").mkdir()
    (pair.source / "a/file").touch()
    (pair.source / "out").symlink_to("/")
    fd = _folder(pair.source)
    steps = [(step.kind, step.path) for step in walk(fd)]
    os.close(fd)
    assert steps == [
        ("enter", ""),
        ("enter", "a"),
        ("entry", "a/file"),
        ("leave", "a"),
        ("entry", "out"),
        ("leave", ""),
    ]


def test_removing_leaves_what_symlinks_lead_to(pair):
    (pair.source / "kept").touch()
    (pair.copy / "out").symlink_to(pair.source)
    (pair.copy / "closed").mkdir()
    (pair.copy / "closed/file").touch()
    (pair.copy / "closed").chmod(0)
    parent = _folder(pair.copy.parent)
    remove(parent, "copy")
    os.close(parent)
    assert not pair.copy.exists()
    assert (pair.source / "kept").exists()


def test_nothing_open_is_left(pair):
    trees.plant(pair.source)
    before = len(os.listdir("/proc/self/fd"))
    pair.run()
    pair.differences()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("path", "aim", "out"),
    [
        ("a", "b", False),
        ("a", "/b", True),
        ("a", "../b", True),
        ("x/a", "../b", False),
        ("x/a", "../../b", True),
        ("x/a", "..", False),
        ("x/y/a", "../../../x", True),
        ("a", "..b", False),
    ],
)
def test_what_leads_out(path, aim, out):
    assert leads_out(path, aim) is out


def test_modes_of_the_root_are_kept(pair):
    pair.source.chmod(0o2750)
    pair.run()
    assert stat.S_IMODE(pair.copy.stat().st_mode) == 0o2750


def test_a_folder_that_others_fill_is_left_empty_and_not_compared(pair):
    (pair.source / "a/inner").mkdir(parents=True)
    (pair.source / "a/inner/file").write_text("x")
    source, copy = _folder(pair.source), _folder(pair.copy)
    made = TreeCopy(share=False, progress=pair.done.append)
    made.run(source, copy, apart={"a/inner"})
    os.close(source)
    os.close(copy)
    assert os.listdir(pair.copy / "a") == ["inner"]
    assert os.listdir(pair.copy / "a/inner") == []
    (pair.copy / "a/inner").chmod(0o700)
    (pair.copy / "a/inner/theirs").touch()
    assert pair.differences(apart={"a/inner"}) == []
    assert len(pair.differences()) >= 2
