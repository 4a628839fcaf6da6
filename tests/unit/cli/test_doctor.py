"""What doctor reads out of grants, /proc and the state directory."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from msgspec.structs import replace

from snapmgr.catalog.manifest import encode
from snapmgr.catalog.store import Catalog
from snapmgr.config.load import load_config
from snapmgr.context import Context
from snapmgr.contract.errors import StorageError
from snapmgr.contract.records import Found
from snapmgr.doctor.collect import active_run, collect_facts
from snapmgr.doctor.diagnose import diagnose
from snapmgr.doctor.finding import Finding, exit_code
from snapmgr.mysql.connect.running import running_servers
from snapmgr.system.host import this_process
from support.sample import lease, manifest


@pytest.fixture
def ctx(config, catalog):
    return Context(config=load_config(config), catalog=catalog)


class _Storage:
    """A backend that only knows what is in its pool."""

    def __init__(self, *found):
        self.found = found

    def missing(self):
        return ()

    def inventory(self, _pools, *, notes=True):  # noqa: ARG002
        if not self.found:
            raise StorageError("the pool is not there")
        return self.found


def _found(of, **fields):
    ref = of.members[0].ref
    values = {"kind": "snapshot", "pool": ref.pool, "name": ref.name, "snapshot_id": of.id, "ref": ref}
    return Found(**(values | fields))


def _problems(findings):
    return [(one.subject, one.what) for one in findings if one.level == "problem"]


@pytest.mark.parametrize(
    ("levels", "code"),
    [(["ok", "note"], 0), (["ok", "missing"], 7), (["missing", "problem"], 1), ([], 0)],
)
def test_a_problem_outranks_what_is_lacking(levels, code):
    assert exit_code([Finding(area="job", subject="x", level=level, what="x") for level in levels]) == code


def test_servers_are_found_by_the_sockets_that_they_listen_on(tmp_path):
    line = "0000: 00000002 00000000 {flags} 0001 01 {inode} {path}\n"
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "unix").write_text(
        "Num       RefCount Protocol Flags    Type St Inode Path\n"
        + line.format(flags="00010000", inode=11, path="/srv/a b/my.sock")
        + line.format(flags="00010000", inode=12, path="/run/mysqld/mysqlx.sock")
        + line.format(flags="00010000", inode=13, path="/run/other.sock")
        + line.format(flags="00000000", inode=14, path="/srv/connected")
        + line.format(flags="00010000", inode=15, path="/run/mysqld/mysqld.sock")
    )
    datadir = tmp_path / "data"
    (datadir / "mysql").mkdir(parents=True)
    for pid, comm, inodes in (("7", "mariadbd", (11, 12, 14)), ("8", "nginx", (13,))):
        (tmp_path / pid / "fd").mkdir(parents=True)
        (tmp_path / pid / "comm").write_text(comm + "\n")
        os.symlink(datadir, tmp_path / pid / "cwd")
        for number, inode in enumerate(inodes):
            os.symlink(f"socket:[{inode}]", tmp_path / pid / "fd" / str(number))
    found = [(server.socket, server.datadir) for server in running_servers(tmp_path)]
    # The usual place first, though its process could not be looked into.
    assert found == [("/run/mysqld/mysqld.sock", None), ("/srv/a b/my.sock", str(datadir))]


def test_an_active_run_is_seen_without_touching_its_lock(catalog):
    code = (
        "import sys; from pathlib import Path; from snapmgr.catalog.store import Catalog\n"
        f"with Catalog(Path({str(catalog.path)!r})).job_lock('nightly'): print('held', flush=True); sys.stdin.read()"
    )
    assert active_run(catalog, "nightly") is None
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        assert active_run(catalog, "nightly") == process.pid
        assert active_run(catalog, "other") is None
        process.stdin.close()
    assert active_run(catalog, "nightly") is None


def test_a_lock_on_another_file_system_is_no_run_of_ours(catalog, monkeypatch):
    with catalog.job_lock("nightly"):
        pass
    lock = (catalog.path / "locks/nightly.lock").stat()
    table = f"1: FLOCK  ADVISORY  WRITE {os.getppid()} fe:fe:{lock.st_ino} 0 EOF\n"
    monkeypatch.setattr("snapmgr.doctor.collect.open", lambda *_, **__: io.StringIO(table), raising=False)
    assert active_run(catalog, "nightly") is None
    # btrfs: stat(2) and /proc/locks name its device differently; who holds it has it open.
    with (catalog.path / "locks/nightly.lock").open():
        table = table.replace(str(os.getppid()), str(os.getpid()))
        assert active_run(catalog, "nightly") == os.getpid()


def _examine(ctx):
    return diagnose(collect_facts(ctx))


def test_leftovers_of_dead_runs_are_named(ctx):
    ctx._backends["reflink"] = _Storage()
    ctx.catalog.write(manifest(4, state="pending", proved_at=None))
    ctx.catalog.write(manifest(5, state="pending"))
    ctx.catalog.write(manifest(6, state="deleting"))
    ctx.catalog.write(manifest(7, state="pending", helper=this_process()))
    (ctx.catalog.path / "leases" / "x.json").write_text("{")
    findings = {finding.subject: finding for finding in _examine(ctx) if finding.area == "state"}
    assert "removes" in findings[manifest(4).id].repair.text
    assert "completes it" in findings[manifest(5).id].repair.text
    assert "DELETING" in findings[manifest(6).id].what
    assert "still hangs" in findings[manifest(7).id].what
    assert findings[manifest(7).id].repair is None
    assert "before the last boot" in findings["/mnt/look"].what
    assert "moves it to" in findings[str(ctx.catalog.path / "leases" / "x.json")].repair.text
    assert len(_problems(findings.values())) == 6


def test_unfinished_is_no_problem_while_its_run_is_active(ctx):
    ctx._backends["reflink"] = _Storage(_found(manifest(0)), _found(manifest(1)), _found(manifest(2)))
    ctx.catalog.write(manifest(4, state="pending", proved_at=None))
    ctx.catalog.drop_lease(lease(manifest(0)))
    assert len(_problems(_examine(ctx))) == 1
    code = (
        "import sys; from pathlib import Path; from snapmgr.catalog.store import Catalog\n"
        f"with Catalog(Path({str(ctx.catalog.path)!r})).job_lock('nightly'): "
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        findings = _examine(ctx)
        process.stdin.close()
    assert _problems(findings) == []
    assert f"a run of its job is active (pid {process.pid})" in "\n".join(finding.what for finding in findings)


def test_the_storage_is_compared_with_the_catalog(ctx):
    stray = manifest(8)
    broken = manifest(9, state="broken")
    ctx.catalog.write(broken)
    moved = manifest(1).members[0].ref
    # The pool is mounted elsewhere now: the same snapshot all the same.
    moved = replace(moved, pool=replace(moved.pool, hint="/elsewhere"))
    ctx._backends["reflink"] = _Storage(
        _found(manifest(0)),
        _found(manifest(1), ref=moved),
        _found(stray),
        _found(broken),
        _found(manifest(2), kind="debris", ref=None, name="half", why="no end mark"),
        _found(manifest(0), kind="attachment", name="known", record_id="0123456789abcdef"),
        _found(manifest(0), kind="attachment", name="clone", record_id="f" * 16),
    )
    said = [what for _, what in _problems([one for one in _examine(ctx) if one.area == "storage"])]
    assert said == [
        f"the storage of {manifest(2).id} is gone",
        f"{broken.id} still exists, although its manifest says BROKEN",
        f"{stray.id} is not in this state directory, and it has no note",
        "half is unfinished: no end mark",
        "clone is a clone without a lease",
    ]


def test_a_storage_that_is_not_there_is_no_empty_one(ctx):
    ctx._backends["reflink"] = _Storage()
    problems = _problems([one for one in _examine(ctx) if one.area == "storage"])
    assert problems == [("reflink /nowhere/snapshots", "the pool is not there")]


@pytest.mark.parametrize(
    "owner", ["/", "", "relative", "/a\\u0000b", "/\\udc80", "/" + "x" * 5000, "/dev/null", "/proc/self"]
)
def test_a_note_may_claim_to_be_of_any_state_directory(ctx, owner):
    stray = manifest(8)
    note = encode(replace(stray, state_dir="OWNER")).replace(b"OWNER", owner.encode())
    ctx._backends["reflink"] = _Storage(*(_found(manifest(number)) for number in range(3)), _found(stray, note=note))
    (told,) = [one for one in _examine(ctx) if stray.id in one.what]
    assert "is not in this state directory" in told.what


def test_what_another_state_directory_knows_is_one_note_with_a_count(ctx, tmp_path):
    strays, other = [manifest(8), manifest(9)], Catalog(tmp_path / "other")
    other.make()
    found = []
    for stray in strays:
        other.write(stray)
        found.append(_found(stray, note=encode(replace(stray, state_dir=str(other.path)))))
    ctx._backends["reflink"] = _Storage(*(_found(manifest(number)) for number in range(3)), *found)
    findings = _examine(ctx)
    assert not [one for one in findings if any(stray.id in one.what for stray in strays)]
    (told,) = [one for one in findings if str(other.path) in one.what]
    assert (told.level, told.what) == ("note", f"snapshots of the state directory {other.path}: 2")


def test_nothing_is_made_by_looking(config, tmp_path):
    ctx = Context(config=load_config(config), catalog=Catalog(tmp_path / "state"))
    assert [finding.level for finding in _examine(ctx)] == ["note"]
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize("given", [True, False])
def test_the_catalog_is_read_after_the_storage_and_twice_only_if_it_names_a_new_one(ctx, monkeypatch, given):
    taken = manifest(8)

    class Storage(_Storage):
        """A backup takes one more snapshot while the storage is read."""

        def inventory(self, pools, *, notes=True):
            ctx.catalog.write(taken)
            return super().inventory(pools, notes=notes)

    ctx._backends["reflink"] = Storage(*(_found(manifest(number)) for number in range(3)), _found(taken))
    looks = []
    look = ctx.catalog.summaries
    monkeypatch.setattr(ctx.catalog, "summaries", lambda *args: looks.append(args) or look(*args))
    findings = diagnose(collect_facts(ctx, [taken.members[0].ref.pool] if given else []))
    assert not [one for one in findings if taken.id in one.what]
    assert len(looks) == (1 if given else 2)
