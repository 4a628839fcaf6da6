"""A damaged state directory: every command ends with a documented exit status, a whole document, and nothing lost."""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
import tempfile
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

import snapmgr
from snapmgr.capacity.series import PoolCapacity
from snapmgr.catalog.inplace import InplaceRecord, MountRecord, OriginRecord
from snapmgr.catalog.manifest import RestoreRecord, Schedule, Verification, encode
from snapmgr.cli.main import main
from snapmgr.config.plugins import list_plugins
from snapmgr.system.boot import lasting_machine_id
from snapmgr.system.host import Process
from support.documents import conforms
from support.sample import NOW, POOL, lease, manifest
from support.thoroughness import CAMPAIGN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DOCUMENTED = {0, 1, 2, 3, 4, 5, 6, 7, 130}
MANY = settings(
    max_examples=3000 if CAMPAIGN else 60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
NOBODY = 65534
Wound = tuple[str, str, bytes, int]
Command = tuple[str, ...]
DEAD = Process(pid=4194303, start_ticks=1, boot_id="another")
READY, BROKEN, PENDING, DELETING = (
    manifest(0),
    replace(manifest(1), state="broken", reason="its storage is gone"),
    replace(manifest(2), state="pending", proved_at=None),
    replace(manifest(3), state="deleting"),
)
READ_ONLY = [
    ("list",),
    ("list", "nightly"),
    ("show", READY.id),
    ("show", "latest"),
    ("status",),
    ("doctor",),
    ("mount", "--list"),
    ("umount", "--all", "--dry-run"),
    ("mount", READY.id, "--dry-run"),
    ("clone", READY.id, "--dry-run"),
    ("verify", READY.id, "--dry-run"),
    ("prepare", READY.id, "--dry-run"),
    ("delete", READY.id, "--dry-run"),
    ("prune", "--dry-run"),
    ("backup", "nightly", "--dry-run"),
    ("restore", READY.id, "DEST", "--dry-run"),
    ("restore", READY.id, "--in-place", "--dry-run"),
    ("schedule", "show"),
    ("config", "validate"),
]
CHANGING = [
    ("pin", READY.id),
    ("unpin", READY.id),
    ("umount", "--all"),
    ("mount", READY.id),
    ("verify", READY.id),
    ("prepare", READY.id),
    ("delete", READY.id, "--yes"),
    ("prune",),
    ("backup", "nightly"),
    ("restore", READY.id, "DEST"),
    ("doctor", "--fix"),
]
# What these do to the manifests is their work.
_WRITERS = {"pin", "unpin", "delete", "doctor"}
_FILES = {
    f"snapshots/{READY.id}/manifest.json": encode(READY),
    f"snapshots/{READY.id}/verified.json": encode(Verification(at=NOW, result="passed", duration_s=2.5)),
    f"snapshots/{READY.id}/tool.log": b"done\n",
    f"snapshots/{BROKEN.id}/manifest.json": encode(BROKEN),
    f"snapshots/{BROKEN.id}/verified.json": encode(
        Verification(at=NOW, result="failed", duration_s=1, failures=("no",))
    ),
    f"snapshots/{PENDING.id}/manifest.json": encode(PENDING),
    f"snapshots/{DELETING.id}/manifest.json": encode(DELETING),
    "leases/0123456789abcdef.json": encode(lease(BROKEN)),
    "schedules/nightly.json": encode(Schedule(job="nightly", kind="cron", expression="daily", installed_at=NOW)),
    "locks/nightly.lock": b"4194303\n",
    "frozen/4194303": b"4194303 1 another\n4194302 1 another\n1.0\n",
    "appliers/4194303": json.dumps(
        {
            "server": {"pid": DEAD.pid, "start_ticks": 1, "boot_id": "another"},
            "guard": None,
            "deadline": 1.0,
            "socket": "/nowhere",
            "defaults_file": None,
            "user": None,
            "mariadb": True,
            "word": "SLAVE",
            "names": [],
        }
    ).encode(),
    "machine": f"{lasting_machine_id()} here\n".encode(),
    "restores/0123456789abcdef.json": encode(
        RestoreRecord(
            token="0123456789abcdef",
            snapshot_id=READY.id,
            dest="/nowhere/dest",
            made_dest=True,
            holder=DEAD,
            user="root",
            began_at=NOW,
        )
    ),
    "inplace/0123456789abcdef.json": encode(
        InplaceRecord(
            token="0123456789abcdef",
            snapshot_id=BROKEN.id,
            jobs=("weekly",),
            holder=DEAD,
            user="root",
            began_at=NOW,
            parts=(
                OriginRecord(
                    ref=BROKEN.members[0].ref,
                    origin="vg/data",
                    device="/dev/nowhere",
                    mounts=(MountRecord(point="/nowhere", root="/", fs_type="xfs", options=(), super_options=()),),
                ),
            ),
        )
    ),
    "tool-logs/nightly.log": b"begun\n",
    "capacity/0123.json": encode(PoolCapacity(backend=POOL.backend, pool_id=POOL.id)),
}
_PLACES = sorted(
    {*_FILES, *(str(Path(name).parent) for name in _FILES), *(f"{name}/x" for name in ("leases", "locks"))}
)
_VALUES = st.sampled_from(
    [
        b"null",
        b"[]",
        b"{}",
        b"7",
        b'"x"',
        b'{"schema": 1}',
        b'{"schema": 99}',
        b"[" * 3000,
        b"\xff\xfe",
        b"\0",
        b"1e999",
    ]
)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _retype(path: Path, old: bytes, value: bytes, place: int) -> None:
    with suppress(ValueError):
        whole = json.loads(old)
        if isinstance(whole, dict) and whole:
            whole[sorted(whole)[place % len(whole)]] = json.loads(value) if value[:1] in b"n{7" else "../../x"
            path.write_text(json.dumps(whole))


_IN_PLACE: dict[str, Callable[[Path, bytes, bytes, int], object]] = {
    "mode": lambda path, *_: path.exists() and path.chmod(0),
    "owner": lambda path, *_: path.exists() and os.chown(path, 12345, 12345),
    "retyped": _retype,
    "missing": lambda path, *_: _remove(path),
}
_INSTEAD: dict[str, Callable[[Path, bytes, bytes, int], object]] = {
    "file": lambda path, _, value, __: path.write_bytes(value),
    "folder": lambda path, *_: (path / "inside").mkdir(parents=True),
    "empty": lambda path, *_: path.touch(),
    "truncated": lambda path, old, _, place: path.write_bytes(old[: place % (len(old) + 1)]),
    "changed": lambda path, old, value, place: path.write_bytes(old[:place] + value + old[place + 1 :]),
    "dangling": lambda path, *_: path.symlink_to("/nowhere/at/all"),
    "loop": lambda path, *_: path.symlink_to(path.name),
    "fifo": lambda path, *_: os.mkfifo(path),
    "long name": lambda path, old, *_: path.with_name("n" * 255).write_bytes(old),
}


def _damage(path: Path, kind: str, value: bytes, place: int) -> None:
    """Put something else where `path` is in the state directory."""
    old = path.read_bytes() if path.is_file() else b""
    if kind in _INSTEAD:
        _remove(path)
        path.parent.mkdir(parents=True, exist_ok=True)
    (_IN_PLACE | _INSTEAD)[kind](path, old, value, place % (len(old) + 1))


KINDS = tuple(_IN_PLACE | _INSTEAD)


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    """Yield a folder that every user may enter, with a configuration."""
    # Another user, as which a command runs here, may have no right to read our modules.
    for module in pkgutil.walk_packages(snapmgr.__path__, "snapmgr."):
        if not module.name.endswith("__main__") and not module.name.startswith("snapmgr.testing"):
            import_module(module.name)
    list_plugins()
    with tempfile.TemporaryDirectory(prefix="snapmgr-damaged-") as name:
        home = Path(name)
        home.chmod(0o755)
        (home / "source").mkdir()
        (home / "source" / "file").write_text("data")
        (home / "snapmgr.toml").write_text(
            f'state_dir = "{home}/state"\nscratch_dir = "{home}/scratch"\n'
            f'[job.nightly]\nsource = "directory"\npath = "{home}/source"\nretention.keep-last = 1\n'
        )
        (home / "snapmgr.toml").chmod(0o644)
        yield home


def _build(state: Path) -> None:
    if state.exists():
        for folder, _, _ in os.walk(state):
            Path(folder).chmod(0o755)
    _remove(state)
    for name, data in _FILES.items():
        path = state / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        path.chmod(0o600)
    for folder in (state, *(path for path in state.rglob("*") if path.is_dir())):
        folder.chmod(0o755)


@contextmanager
def _as_user(number: int) -> Iterator[None]:
    old = os.geteuid()
    os.seteuid(number)
    try:
        yield
    finally:
        os.seteuid(old)


def _intact(state: Path) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = {}
    for name in _FILES:
        path = state / name
        with suppress(OSError):
            found[name] = path.read_bytes() if path.is_file() and path.lstat().st_size else None
    return found


def _outside(home: Path) -> list[tuple[str, bytes]]:
    return [
        (str(path), path.read_bytes() if path.is_file() else b"")
        for path in sorted(home.rglob("*"))
        if home / "state" not in (path, *path.parents)
    ]


@pytest.mark.needs("root")
@pytest.mark.timeout(900 if CAMPAIGN else 120)
@MANY
@given(
    wounds=st.lists(
        st.tuples(st.sampled_from(_PLACES), st.sampled_from(KINDS), _VALUES, st.integers(0, 10_000)),
        min_size=1,
        max_size=2,
    ),
    command=st.sampled_from([*READ_ONLY, *CHANGING]),
    user=st.sampled_from([0, 0, 0, NOBODY]),
    as_json=st.booleans(),
)
def test_each_command_on_a_damaged_state_directory(
    home: Path, capsys: pytest.CaptureFixture[str], wounds: list[Wound], command: Command, user: int, as_json: bool
) -> None:
    _try(home, capsys, wounds, command, user=user, as_json=as_json)


@pytest.mark.needs("root")
@pytest.mark.parametrize("kind", KINDS)
def test_each_folder_damaged_in_each_way(home: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    folders = sorted({name.partition("/")[0] for name in _FILES})
    for number, folder in enumerate(folders):
        # Not each command on each folder: the next kind has another.
        command = READ_ONLY[(number + KINDS.index(kind) * 3) % len(READ_ONLY)]
        for one in (("list",), command):
            _try(home, capsys, [(folder, kind, b"7", 0)], one, user=0, as_json=True)


def _try(
    home: Path,
    capsys: pytest.CaptureFixture[str],
    wounds: list[Wound],
    command: Command,
    *,
    user: int,
    as_json: bool,
) -> None:
    """Damage a fresh state directory, run a command, and judge what it did."""
    state = home / "state"
    _build(state)
    for place, kind, value, where in wounds:
        with suppress(OSError):  # the first wound may leave no place for the second
            _damage(state / place, kind, value, where)
    before, outside = _intact(state), _outside(home)
    words = [str(home / "new") if word == "DEST" else word for word in command]
    capsys.readouterr()
    with _as_user(user):
        code = main(["--config", str(home / "snapmgr.toml"), *words, *(["--json"] if as_json else [])])
    said = capsys.readouterr()
    assert code in DOCUMENTED
    assert "Traceback" not in said.err, said.err
    assert "bug in snapmgr" not in said.err, said.err
    if as_json:
        document = json.loads(said.out)
        conforms(document)
        assert document["exit_code"] == code
    if code not in (0, 3):
        assert "snapmgr: error: " in said.err or "warning" in said.err or command[0] in ("doctor", "status"), said.err
    assert [one for one in _outside(home) if "scratch" not in one[0]] == outside
    if command[0] not in _WRITERS:
        after = _intact(state)
        hurt = {name for name in before if "manifest.json" in name and before[name] != after.get(name)}
        assert not {name for name in hurt if before[name] == _FILES[name]}, said.err


def test_a_file_in_place_of_a_folder_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (
        "snapshots",
        "leases",
        "schedules",
        "restores",
        "inplace",
        "locks",
        "frozen",
        "appliers",
        "capacity",
    ):
        _build(home / "state")
        _remove(home / "state" / folder)
        (home / "state" / folder).write_text("x")
        assert main(["--config", str(home / "snapmgr.toml"), "list", "--json"]) == 1
        assert f"{home / 'state' / folder} is not a folder" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_record_of_a_frozen_server_that_cannot_be_read_is_kept_and_told(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("frozen", "appliers"):
        _build(home / "state")
        path = home / "state" / folder / "4194303"
        path.unlink()
        os.mkfifo(path)
        main(["--config", str(home / "snapmgr.toml"), "list"])
        assert str(path) in capsys.readouterr().err
        assert path.exists()
