"""Preparing a folder: options, places, the hidden folder, and a private mount that is refused."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import contextmanager
from pathlib import Path

import click
import pytest

from snapmgr.api import FolderCloning, Remounting
from snapmgr.cli.toolbackup import PrepareOptions, is_path, make_order, parse_mount_options
from snapmgr.config.load import default_config
from snapmgr.contract.errors import BusyError, ConfigError, MissingRequirementError, StorageError
from snapmgr.contract.records import ClientOptions
from snapmgr.physical.prepare import inplace
from snapmgr.physical.prepare import run as running
from snapmgr.physical.prepare.backupfolder import BackupFolder
from snapmgr.physical.prepare.inplace import ApplySettings, NoMountError, apply_in_place, choose_memory
from snapmgr.physical.prepare.order import PrepareOrder
from snapmgr.physical.prepare.ownership import take_owners
from snapmgr.physical.prepare.places import choose_places
from snapmgr.physical.prepare.workfolder import work_folder
from snapmgr.physical.tools.request import BackupInfo

# ------------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize("text", ["/backup/full", "./full", "backup/full", ".", ".."])
def test_a_path_has_a_slash(text):
    assert is_path(text)
    assert not is_path("nightly@latest")


def test_mount_options():
    given = ("writeback", "upload-delay=1h", "cache-size=4G", "--cache-dir=/var/c", "max-uploads=150", "no-bgjob")
    assert parse_mount_options((*given, "warm-up")) == (
        ClientOptions(
            writeback=True,
            upload_delay_s=3600.0,
            cache_bytes=4 << 30,
            cache_dir="/var/c",
            extra=("--max-uploads", "150", "--no-bgjob"),
        ),
        True,
    )
    assert parse_mount_options(()) == (None, False)


@pytest.mark.parametrize(
    "wrong", ["writeback=yes", "upload-delay=soon", "cache-size=", "cache-dir=here", "", "warm-up=1"]
)
def test_wrong_mount_options(wrong):
    with pytest.raises(click.UsageError, match="--mount-option"):
        parse_mount_options((wrong,))


def _options(**given):
    nothing = dict.fromkeys(("strategy", "result", "use_memory_bytes", "scratch"))
    return PrepareOptions(**{**nothing, "tool_options": (), "mount_options": (), **given})


def test_orders():
    config = default_config()
    order = make_order("/b", None, _options(strategy="auto"), config)
    assert (order.strategy, order.target, order.scratch) == (None, None, str(config.scratch_dir))
    order = make_order("/b", Path("/x/y"), _options(mount_options=("writeback",), scratch=Path("/s")), config)
    assert (order.strategy, order.target, order.scratch) == ("storage", "/x/y", "/s")
    for wrong in (
        {"strategy": "scratch", "mount_options": ("writeback",)},
        {"strategy": "storage", "result": "scratch"},
        {"strategy": "overlay", "result": "scratch"},
    ):
        with pytest.raises(click.UsageError):
            make_order("/b", None, _options(**wrong), config)


# ------------------------------------------------------------------------------------------------------------- places


def _place(source, scratch, *, target=None, result=None):
    return choose_places(
        str(source), target=str(target) if target else None, beside=None, result=result, scratch=str(scratch), make=True
    )


def test_where_results_go(tmp_path):
    source = tmp_path / "store" / "full"
    source.mkdir(parents=True)
    places = _place(source, tmp_path / "scratch")
    assert places.result is None
    assert places.storage_target == str(tmp_path / "store" / "full.prepared")
    assert places.scratch_target == str(tmp_path / "scratch" / "full.prepared")
    (tmp_path / "scratch" / "full.prepared").mkdir()
    assert _place(source, tmp_path / "scratch").scratch_target.endswith("/full.prepared-2")
    (tmp_path / "store" / "full.prepared").mkdir()
    for result in (None, "storage"):
        assert _place(source, tmp_path / "scratch", result=result).storage_target.endswith("/full.prepared-2")
    # On the same file system: in the storage.
    there = _place(source, tmp_path / "scratch", target=tmp_path / "new")
    assert (there.result, there.beside, there.storage_target) == ("storage", str(tmp_path), str(tmp_path / "new"))
    with pytest.raises(ConfigError, match="is in the storage"):
        _place(source, tmp_path / "scratch", target=tmp_path / "new", result="scratch")
    other = next(one for one in ("/dev/shm", "/run", "/") if os.stat(one).st_dev != tmp_path.stat().st_dev)
    elsewhere = _place(source, tmp_path / "scratch", target=os.path.join(other, "snapmgr-none"))
    assert (elsewhere.result, elsewhere.scratch) == ("scratch", other)
    for strategy in ("storage", "overlay"):
        order = PrepareOrder(
            source=str(source), target=elsewhere.scratch_target, strategy=strategy, scratch=str(tmp_path)
        )
        with pytest.raises(ConfigError, match=f'is not in the storage of .* where the strategy "{strategy}" leaves'):
            order.places(make=False)


@pytest.mark.parametrize(
    ("target", "said"),
    [("store", "exists"), ("store/full/in", "lies in the backup"), ("no/where", "is not an existing folder")],
)
def test_targets_that_are_refused(tmp_path, target, said):
    source = tmp_path / "store" / "full"
    source.mkdir(parents=True)
    with pytest.raises(ConfigError, match=said):
        _place(source, tmp_path / "scratch", target=tmp_path / target)


# -------------------------------------------------------------------------------------------------- the hidden folder


def test_what_is_not_landed_is_removed(tmp_path):
    with work_folder(str(tmp_path), "/b", str(tmp_path / "t")) as work:
        for name in ("t", "other"):
            os.mkdir(os.path.join(work.path, name))
            Path(work.path, name, "file").touch()
        assert work.move_up("t") == str(tmp_path / "t")
        os.mkdir(os.path.join(work.path, "t"))
        with pytest.raises(ConfigError, match="has appeared meanwhile"):
            work.move_up("t")
    assert os.listdir(tmp_path) == ["t"]
    assert os.listdir(tmp_path / "t") == ["file"]


def _hidden(tmp_path, digit, record):
    folder = tmp_path / f".snapmgr-prepare-{digit * 16}"
    (folder / "full").mkdir(parents=True)
    (folder / "full" / "file").touch()
    if record is not None:
        record = {"source": "/b", "target": "/t", "inode": folder.stat().st_ino} | record
        (folder / "record.json").write_text(json.dumps(record))
    return folder


def test_only_dead_ones_of_ours_are_removed(tmp_path):
    ours = _hidden(tmp_path, "a", {})
    same_target = _hidden(tmp_path, "b", {"source": "/other"})
    others = [
        _hidden(tmp_path, "c", {"source": "/other", "target": "/elsewhere"}),
        _hidden(tmp_path, "d", {"inode": 1}),
        _hidden(tmp_path, "e", None),
    ]
    begun = tmp_path / f".snapmgr-prepare-{'f' * 16}"
    begun.mkdir()
    told = []
    with work_folder(str(tmp_path), "/b", "/t", tell=told.append):
        pass
    assert sorted(tmp_path.iterdir()) == others
    assert len(told) == 3
    assert str(ours) in "".join(told)
    assert str(same_target) in "".join(told)


def test_one_at_a_time(tmp_path):
    with work_folder(str(tmp_path), "/b", "/t"):
        with pytest.raises(BusyError), work_folder(str(tmp_path), "/b", "/u"):
            pass
        with work_folder(str(tmp_path), "/c", "/v"):
            pass
        assert len(os.listdir(tmp_path)) == 1
    assert os.listdir(tmp_path) == []


# ----------------------------------------------------------------------------------------- -----------memory, owners


@pytest.mark.parametrize(
    ("redo", "available", "chosen"),
    [(0, 8 << 30, 128 << 20), (100 << 20, 8 << 30, 500 << 20), (8 << 30, 64 << 30, 8 << 30), (8 << 30, 0, 128 << 20)],
)
def test_memory(redo, available, chosen):
    assert choose_memory(redo, available) == chosen


def test_new_files_get_the_owner_of_the_old(tmp_path):
    source, copy = tmp_path / "a", tmp_path / "b"
    source.mkdir(mode=0o750)
    (source / "old").touch(mode=0o640)
    (source / "db").mkdir(mode=0o710)
    shutil.copytree(source, copy)
    (copy / "old").chmod(0o600)
    (copy / "new").touch(mode=0o600)
    (copy / "db" / "new").touch(mode=0o666)
    if os.geteuid() == 0:
        for path in (copy, copy / "db"):
            os.chown(path, 1234, 1235)
    take_owners(str(source), str(copy), sync=True)
    modes = {path.name: path.stat().st_mode & 0o7777 for path in copy.iterdir()}
    assert modes == {"old": 0o640, "new": 0o640, "db": 0o710}
    assert (copy / "db" / "new").stat().st_mode & 0o7777 == 0o600
    if os.geteuid() == 0:
        assert (copy / "new").stat().st_uid == 1234
        assert (copy / "db").stat().st_uid == os.stat(source).st_uid


# ------------------------------------------------------------------------------------------------- a private mount


class _Mount:
    def __init__(self, storage, path, options):
        self.storage, self.path, self.point, self.options = storage, path, path, options

    def counters(self):
        return {}

    def settle(self, _timeout_s, _tell=None):
        self.storage.calls.append("settle")

    def warm_up(self, path):
        self.storage.calls.append(f"warm-up {os.path.basename(path)}")


class _Storage:
    def __init__(self, *, refuses=False):
        self.calls = []
        self.options = None
        self._refuses = refuses

    def clone_folder(self, source, target):
        self.calls.append("clone")
        shutil.copytree(source, target)

    @contextmanager
    def client_mount(self, path, options):
        if self._refuses:
            raise StorageError("cannot mount", hint="a password")
        self.options = options
        self.calls.append("mount")
        yield _Mount(self, path, options)
        self.calls.append("unmount")


class _Tool:
    name = "mariadb-backup"
    applies = increments = True

    def __init__(self, fails=None):
        self.requests = []
        self._fails = fails

    def missing(self):
        return ()

    def apply(self, request):
        self.requests.append(request)
        if self._fails is not None:
            Path(request.log).write_text("what it said\n")
            raise StorageError(f"it failed, see {request.log}")
        Path(request.folder, "prepared").touch()


def test_a_private_mount_in_its_order(tmp_path):
    storage, tool = _Storage(), _Tool()
    assert isinstance(storage, Remounting)
    assert isinstance(storage, FolderCloning)
    (tmp_path / "clone").mkdir()
    settings = ApplySettings(use_memory_bytes=7, client=ClientOptions(writeback=True), warm_up=True)
    apply_in_place(
        str(tmp_path / "clone"),
        tool,
        settings,
        log=str(tmp_path / "log"),
        storage=storage,
        after=lambda folder: storage.calls.append(f"after {os.path.basename(folder)}"),
    )
    assert storage.calls == ["mount", "warm-up clone", "after clone", "settle", "unmount"]
    assert tool.requests[0].use_memory_bytes == 7
    with pytest.raises(NoMountError, match="no private mount: cannot mount"):
        apply_in_place(
            str(tmp_path / "clone"), tool, settings, log=str(tmp_path / "log"), storage=_Storage(refuses=True)
        )
    with pytest.raises(StorageError, match="no client program"):
        apply_in_place(str(tmp_path / "clone"), tool, settings, log=str(tmp_path / "log"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A backup that must be prepared in its storage: scratch has room for the uploads, but not for the data."""
    source = tmp_path / "store" / "full"
    source.mkdir(parents=True)
    (source / "ibdata1").write_bytes(b"x" * 1000)
    backup = BackupFolder(
        info=BackupInfo(
            tool="mariadb-backup",
            tool_version="10.11.6",
            flavor="mariadb",
            server_version="10.11.6",
            state="raw",
            from_lsn=0,
            to_lsn=7,
            last_lsn=7,
            position=None,
        ),
        stamps={"ibdata1": (1 << 30, 1), "ib_logfile0": (200 << 10, 1)},
    )
    monkeypatch.setattr(running, "inspect", lambda *_a, **_n: backup)
    monkeypatch.setattr(running, "free_bytes", lambda folder: 512 << 20 if folder.endswith("/scratch") else 1 << 40)
    monkeypatch.setattr(inplace, "_SETTLE_S", 1.0)

    # The files are there by their names only.
    monkeypatch.setattr(running, "stamps", lambda folder: backup.stamps | _changed(folder))

    class _State:
        state = "prepared"

    monkeypatch.setattr(running, "read_info", lambda _folder: _State)
    return source


def _changed(folder):
    return {} if os.stat(os.path.join(folder, "ibdata1")).st_size == 1000 else {"ibdata1": (1001, 2)}


def _prepare(folder, storage, tool, monkeypatch, **order):
    monkeypatch.setattr(running, "tool_for", lambda *_a, **_n: tool)
    told = []
    scratch = str(folder.parent.parent / "scratch")
    ready = running.prepare_folder(
        PrepareOrder(source=str(folder), scratch=scratch, **order), storage, tell=told.append
    )
    return ready, told


def test_auto_takes_a_private_mount(folder, monkeypatch):
    storage = _Storage()
    ready, _ = _prepare(folder, storage, _Tool(), monkeypatch)
    assert (ready.way, ready.result, ready.path) == ("writeback", "storage", f"{folder}.prepared")
    assert storage.calls == ["clone", "mount", "settle", "unmount"]
    assert storage.options.writeback
    assert storage.options.upload_delay_s == 3600.0
    assert storage.options.cache_dir.startswith(str(folder.parent.parent / "scratch" / ".snapmgr-prepare-"))
    assert Path(ready.path, "prepared").exists()
    assert not Path(folder, "prepared").exists()


def test_a_refused_private_mount_leads_to_the_next_way(folder, monkeypatch):
    storage = _Storage(refuses=True)
    ready, told = _prepare(folder, storage, _Tool(), monkeypatch)
    assert ready.way == "storage"
    assert storage.calls == ["clone"]
    assert "warning: no private mount: cannot mount (a password)" in told
    # Who asked for it is told.
    with pytest.raises(MissingRequirementError, match="no private mount"):
        _prepare(
            folder,
            _Storage(refuses=True),
            _Tool(),
            monkeypatch,
            strategy="storage",
            target=str(folder.parent / "new"),
            settings=ApplySettings(client=ClientOptions(writeback=True)),
        )
    assert sorted(os.listdir(folder.parent)) == ["full", "full.prepared"]


def test_the_strategy_storage_works_through_the_mount_that_is_there(folder, monkeypatch):
    storage = _Storage()
    ready, _ = _prepare(folder, storage, _Tool(), monkeypatch, strategy="storage")
    assert ready.way == "storage"
    assert storage.calls == ["clone"]


def test_scratch_may_be_the_folder_beside_the_backup(folder, monkeypatch):
    monkeypatch.setattr(running, "tool_for", lambda *_a, **_n: _Tool())
    order = PrepareOrder(source=str(folder), scratch=str(folder.parent), strategy="storage")
    assert running.prepare_folder(order, _Storage()).path == f"{folder}.prepared"
    assert sorted(os.listdir(folder.parent)) == ["full", "full.prepared"]


@pytest.mark.parametrize(("writeback", "way"), [(True, "writeback"), (False, "storage")])
def test_who_says_how_to_mount_has_chosen(folder, monkeypatch, writeback, way):
    storage = _Storage()
    options = ClientOptions(writeback=writeback, extra=("--max-uploads", "9"))
    ready, _ = _prepare(
        folder, storage, _Tool(), monkeypatch, strategy="storage", settings=ApplySettings(client=options, warm_up=True)
    )
    assert ready.way == way
    assert storage.calls == ["clone", "mount", "warm-up full.prepared", "settle", "unmount"]
    assert (storage.options.writeback, storage.options.extra) == (writeback, ("--max-uploads", "9"))


def test_a_backup_that_changes_meanwhile_is_noticed(folder, monkeypatch):
    class Writing(_Tool):
        def apply(self, request):
            super().apply(request)
            (folder / "ibdata1").write_bytes(b"y" * 1001)

    with pytest.raises(StorageError, match="changed during the prepare"):
        _prepare(folder, _Storage(), Writing(), monkeypatch)
    assert os.listdir(folder.parent) == ["full"]


def test_a_failed_tool_leaves_its_log(folder, monkeypatch):
    with pytest.raises(StorageError) as caught:
        _prepare(folder, _Storage(), _Tool(fails=True), monkeypatch)
    (log,) = (folder.parent.parent / "scratch").iterdir()
    assert str(log) in caught.value.message
    assert log.read_text() == "what it said\n"
    assert os.listdir(folder.parent) == ["full"]


@pytest.mark.parametrize("order", [{"strategy": "storage"}, {"strategy": "overlay"}, {"result": "storage"}])
def test_the_hint_where_nothing_clones_names_the_other_way(folder, monkeypatch, order):
    with pytest.raises(StorageError, match="the storage cannot clone folders") as caught:
        _prepare(folder, None, _Tool(), monkeypatch, **order)
    assert "--strategy scratch" in (caught.value.hint or "")


def test_a_private_mount_where_there_is_none_is_told(folder, monkeypatch):
    order = {"strategy": "storage", "settings": ApplySettings(client=ClientOptions(writeback=True))}
    with pytest.raises(
        StorageError, match="cannot be prepared here: on a clone through a private mount .* cannot"
    ) as caught:
        _prepare(folder, None, _Tool(), monkeypatch, **order)
    assert "--mount-option" in (caught.value.hint or "")


def test_no_way_at_all(folder, monkeypatch):
    monkeypatch.setattr(running, "free_bytes", lambda _folder: 1 << 20)
    with pytest.raises(StorageError, match="cannot be prepared here: .*scratch space are needed"):
        _prepare(folder, None, _Tool(), monkeypatch)
    assert os.listdir(folder.parent.parent / "scratch") == []
