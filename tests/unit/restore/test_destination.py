"""A destination gets the complete tree or nothing, whenever its process dies; other files there stay unchanged."""

from __future__ import annotations

import os
import signal
import stat
from pathlib import Path

import pytest

from snapmgr.catalog.store import Catalog
from snapmgr.contract.errors import BusyError, CatalogError, ConfigError, StorageError
from snapmgr.restore import destination as module
from snapmgr.restore.destination import FinishedMeanwhileError, claim_destination, resolve_record
from snapmgr.restore.destination_check import choose_destination
from snapmgr.testing import trees
from snapmgr.tree import hiddenfolder

NAMES = ("a", "b", "c", "\udcff")


@pytest.fixture(name="catalog")
def _catalog(tmp_path):
    catalog = Catalog(tmp_path / "state")
    catalog.make()
    return catalog


@pytest.fixture(name="dest")
def _dest(tmp_path):
    return tmp_path / "dest"


def _build(place):
    for name in NAMES:
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT, 0o600, dir_fd=place.tree_fd))
    os.mkdir("folder", 0o555, dir_fd=place.tree_fd)
    source = os.open(place.record.dest + "/..", os.O_RDONLY)
    try:
        place.keep_root_attributes(source)
    finally:
        os.close(source)


def _restore(catalog, dest, report="{}"):
    with claim_destination(catalog, str(dest), "demo.x.12345678") as place:
        _build(place)
        place.finish(report)


def _complete(dest):
    return sorted(os.listdir(dest)) == sorted([*NAMES, "folder"])


def _records(catalog):
    return catalog.restorations()[0]


def test_it_appears_at_the_end_with_its_own_attributes(catalog, dest, tmp_path):
    tmp_path.chmod(0o2751)
    os.utime(tmp_path, ns=(5, 7))
    with claim_destination(catalog, str(dest), "demo.x.12345678") as place:
        os.utime(tmp_path, ns=(5, 7))
        _build(place)
        (hidden,) = dest.iterdir()
        assert stat.S_IMODE(hidden.stat().st_mode) == 0o700
        assert [record.dest for record in _records(catalog)] == [str(dest)]
        place.finish("{}")
        assert _complete(dest)
    info = dest.stat()
    assert (stat.S_IMODE(info.st_mode), info.st_mtime_ns) == (0o2751, 7)
    assert stat.S_IMODE((dest / "folder").stat().st_mode) == 0o555
    assert _records(catalog) == []


@pytest.mark.parametrize("existed", [True, False])
def test_what_fails_leaves_nothing(catalog, dest, existed):
    if existed:
        dest.mkdir(mode=0o710)

    def fail():
        with claim_destination(catalog, str(dest), "demo.x.12345678") as place:
            _build(place)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert dest.exists() == existed
    if existed:
        assert os.listdir(dest) == []
        assert stat.S_IMODE(dest.stat().st_mode) == 0o710
    assert _records(catalog) == []


def _die_at(catalog, dest, function, number):
    """Restore in a child that is killed right before its `number`th call of a function, of whichever module it is."""
    child = os.fork()
    if child == 0:
        # Whatever happens here: the child must not go on with pytest's work.
        try:
            calls = iter(range(number, -1, -1))
            owner = next(one for one in (Catalog, module, hiddenfolder) if hasattr(one, function))
            real = getattr(owner, function)

            def call(*arguments):
                if next(calls) == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments)

            setattr(owner, function, call)
            _restore(catalog, dest)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    ("function", "number"),
    [
        ("_make_and_lock", 0),
        ("make_hidden", 0),
        ("_write_record", 0),
        ("make_folder", 0),
        ("make_folder", 1),
        ("_write_record", 1),
        ("rename_new", 0),
        ("rename_new", 2),
        ("rename_new", 4),
        ("keep", 1),
        ("remove", 0),
        ("drop_restoration", 0),
    ],
)
@pytest.mark.parametrize("how", ["restore", "clear"])
def test_killed_anywhere_it_converges(catalog, dest, function, number, how):
    assert _die_at(catalog, dest, function, number) == -signal.SIGKILL
    finishing = function in ("rename_new", "remove", "drop_restoration") or (function, number) == ("keep", 1)
    assert len(_records(catalog)) == 1
    if how == "clear":
        (record,) = _records(catalog)
        outcome = resolve_record(catalog, record)
        assert outcome == ("finished" if finishing and function != "drop_restoration" else "removed")
        assert dest.exists() == finishing
        assert resolve_record(catalog, record) == "removed"
    elif not finishing:
        _restore(catalog, dest)
    elif function == "drop_restoration":
        # Complete but for the note of it in the state directory.
        with pytest.raises(ConfigError, match="is not empty"):
            _restore(catalog, dest)
    else:
        with pytest.raises(FinishedMeanwhileError) as caught:
            _restore(catalog, dest, "another")
        assert caught.value.record.report == "{}"
    assert _records(catalog) == []
    if how == "restore" or finishing:
        assert _complete(dest)
        assert stat.S_IMODE(dest.stat().st_mode) == stat.S_IMODE(dest.parent.stat().st_mode)


def test_somebodys_file_in_the_way_is_left_alone_and_the_tree_waits(catalog, dest):
    def disturb():
        with claim_destination(catalog, str(dest), "demo.x.12345678") as place:
            _build(place)
            (dest / "b").write_text("theirs")
            place.finish("{}")

    with pytest.raises(StorageError, match="b appeared during the restore") as caught:
        disturb()
    assert "move it away" in (caught.value.hint or "")
    assert (dest / "b").read_text() == "theirs"
    (record,) = _records(catalog)
    with pytest.raises(StorageError, match="b appeared during the restore"):
        resolve_record(catalog, record)
    (dest / "b").unlink()
    assert resolve_record(catalog, record) == "finished"
    assert _complete(dest)
    assert (dest / "b").read_text() == ""


def test_only_one_at_a_time(catalog, dest):
    with claim_destination(catalog, str(dest), "demo.x.12345678") as place:
        with pytest.raises(BusyError), claim_destination(catalog, str(dest), "demo.x.12345678"):
            pytest.fail("two at once")
        assert resolve_record(catalog, place.record) == "active"
        assert len(_records(catalog)) == 1
        _build(place)
        place.finish("{}")
    assert _complete(dest)


def test_a_folder_that_only_has_such_a_name_is_not_ours(catalog, dest):
    theirs = dest / (".snapmgr-restore-" + "0" * 16)
    (theirs / "tree").mkdir(parents=True)
    (theirs / "tree" / "precious").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        _restore(catalog, dest)
    (theirs / "record.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not empty"):
        _restore(catalog, dest)
    assert (theirs / "tree" / "precious").exists()


def test_a_damaged_record_is_named(catalog):
    Path(catalog.path, "restores", "00.json").write_text("nonsense")
    records, damaged = catalog.restorations()
    assert records == []
    assert [one.path.name for one in damaged] == ["00.json"]


def test_a_default_acl_of_the_destination_is_not_given_to_the_tree(catalog, dest):
    dest.mkdir()
    acl = trees._acl(12345)
    os.setxattr(dest, "system.posix_acl_default", acl)
    with claim_destination(catalog, str(dest), "demo.x.12345678") as place:
        _build(place)
        place.finish("{}")
    assert os.listxattr(dest / "a") == []


def test_the_destination_is_named_without_symlinks_on_the_way(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    chosen = choose_destination(f"{tmp_path}/link/../link/x/", sources=(), barred={})
    assert chosen == f"{tmp_path.resolve()}/link/x".replace("/link/", "/real/")


def test_the_place_of_the_source_itself_will_do_if_it_is_free(tmp_path):
    source = tmp_path / "source"
    assert choose_destination(str(source), sources={str(source)}, barred={}) == str(source)
    source.mkdir()
    assert choose_destination(str(source), sources={str(source)}, barred={}) == str(source)
    with pytest.raises(ConfigError, match="is in the source"):
        choose_destination(f"{source}/x", sources={str(source)}, barred={})
    (source / "ibdata1").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        choose_destination(str(source), sources={str(source)}, barred={})


def test_a_disk_that_is_full_at_the_last_record_leaves_nothing(catalog, dest, monkeypatch):
    real = module._write_record

    def full(hidden_fd, record):
        if record.finishing:
            raise CatalogError("cannot write record.json: No space left on device")
        real(hidden_fd, record)

    monkeypatch.setattr(module, "_write_record", full)
    with pytest.raises(CatalogError):
        _restore(catalog, dest)
    assert not dest.exists()
    assert _records(catalog) == []


def test_our_own_folders_are_not_restored_to(tmp_path):
    for path in (tmp_path, tmp_path / "x"):
        with pytest.raises(ConfigError, match="is in the scratch directory"):
            choose_destination(str(path), sources=(), barred={str(tmp_path): "the scratch directory"})
