"""The design's rules about imports hold, and the contracts that check them leave no module out."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest

from snapmgr.catalog.manifest import Lease, Manifest, Member, Schedule, Verification, encode
from snapmgr.catalog.summary import StoredPart, Summary
from snapmgr.config.model import Job
from snapmgr.contract.records import Pool, SnapshotRef
from snapmgr.system.host import Process

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONTRACTS = {contract["name"]: contract for contract in PYPROJECT["tool"]["importlinter"]["contracts"]}
BACKENDS = sorted(path.parent for path in (ROOT / "backends").glob("*/__init__.py"))


def _lint(folder):
    return subprocess.run(
        [Path(sys.executable).parent / "lint-imports", "--no-cache"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_contracts_are_kept():
    done = _lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(CONTRACTS)} kept, 0 broken" in done.stdout


@pytest.mark.parametrize(
    ("module", "statement", "contract"),
    [
        ("snapmgr/contract/units.py", "import snapmgr.catalog.store", "Imports go one way"),
        ("snapmgr/keep/pin.py", "import snapmgr.verify.run", "Imports go one way"),
        ("snapmgr/capacity/series.py", "if TYPE_CHECKING:\n    import snapmgr.capacity.lost", "No import cycle"),
        ("snapmgr/mysql/connect/client.py", "import snapmgr.mysql.lock.levels", "Rooms of mysql"),
        ("snapmgr/retention.py", "import subprocess", "subprocess only in system.command"),
        ("snapmgr/catalog/store.py", "import rich.table", "click and rich only in the command line"),
        ("snapmgr/catalog/store.py", "import pymysql", "PyMySQL only in mysql.connect"),
        ("snapmgr/system/mount.py", "import pyudev", "pyudev only in system.blockdev"),
        ("snapmgr/retention.py", "import msgspec", "retention stands on the standard library alone"),
        ("snapmgr/plugins.py", "import snapmgr_btrfs", "snapmgr never imports a backend"),
        ("snapmgr/bench/measure/quiet.py", "import snapmgr.bench.run.plan", "The rooms of the benchmark are in layers"),
        ("snapmgr/bench/device/mark.py", "import snapmgr.bench.device.target", "No import cycle"),
        ("snapmgr/bench/run/plan.py", "import numpy", "scipy and numpy only"),
        ("backends/snapmgr_reflink/__init__.py", "import snapmgr.system.command", "A backend imports snapmgr.api"),
        ("backends/snapmgr_reflink/__init__.py", "import snapmgr_btrfs", "Backends do not know each other"),
    ],
)
def test_contract_breaks_when_it_should(module, statement, contract, tmp_path):
    # A contract that names a wrong module is kept for ever: so break each one in a copy.
    for name in ("snapmgr", "backends"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / module).open("a") as file:
        file.write(f"\n{statement}\n")
    # The installed snapmgr is found by path entries of ROOT: the copy must come first.
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from importlinter.cli import lint_imports_command as c; c()", "--no-cache"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{tmp_path / 'backends'}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    broken = [line for line in done.stdout.splitlines() if line.startswith(contract) and "BROKEN" in line]
    assert broken, done.stdout + done.stderr


def test_backend_contract_names_every_module_but_the_api():
    modules = {f"snapmgr.{path.stem}" for path in (ROOT / "snapmgr").glob("*.py") if path.stem != "__init__"}
    modules |= {f"snapmgr.{path.parent.name}" for path in (ROOT / "snapmgr").glob("*/__init__.py")}
    contract = CONTRACTS["A backend imports snapmgr.api and nothing else of snapmgr"]
    named = {name for name in contract["forbidden_modules"] if name.startswith("snapmgr.")}
    assert named == modules - {"snapmgr.api", "snapmgr.__main__"}
    facade = CONTRACTS["The facade for plugins re-exports the contract, system calls and the kit"]
    assert set(facade["forbidden_modules"]) == named - {
        "snapmgr.contract",
        "snapmgr.copystore",
        "snapmgr.system",
        "snapmgr.tree",
    }


def _loaded(code):
    """Return the modules that a process has loaded in the end, without what our test tools bring with them."""
    code += "\nimport sys; sys.stdout = sys.__stdout__; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split()) - {"typing_extensions", "_distutils_hack"}


def _ours(loaded):
    return {name for name in loaded if name.startswith("snapmgr")}


_QUIETLY = "import io, sys; from snapmgr.cli.main import main; sys.stdout = io.StringIO(); main({})"


def test_help_loads_little_beside_click():
    bare = _loaded("import click, click.formatting, shutil")
    more = _loaded(_QUIETLY.format(["--help"])) - bare
    assert len(_ours(more)) <= 11, more
    # signal, and select for the reader that has gone.
    assert len(more) <= 20, more
    assert not {"pathlib", "traceback", "dataclasses", "msgspec", "inspect"} & (more - bare)


def test_a_listing_loads_no_storage_and_no_server(tmp_path):
    config = tmp_path / "snapmgr.toml"
    config.write_text(f'state_dir = "{tmp_path}/state"\n[job.demo]\nsource = "directory"\npath = "{tmp_path}"\n')
    loaded = _loaded(_QUIETLY.format(["--config", str(config), "list"]))
    rooms = {name.split(".")[1] for name in _ours(loaded) if "." in name}
    assert "catalog" in rooms
    assert rooms <= {"access", "capacity", "catalog", "cli", "config", "contract", "system"}, rooms
    assert len(_ours(loaded)) <= 45, _ours(loaded)
    assert not {"dataclasses", "email", "importlib.metadata", "subprocess", "ctypes", "hashlib"} & loaded


def test_status_loads_no_calendar_without_a_schedule(tmp_path):
    config = tmp_path / "snapmgr.toml"
    config.write_text(f'state_dir = "{tmp_path}/state"\n[job.demo]\nsource = "directory"\npath = "{tmp_path}"\n')
    code = _QUIETLY.format(["--config", str(config), "status"])
    assert not {"zoneinfo", "oncalendar", "subprocess", "snapmgr.doctor.rebuild"} & _loaded(code)
    path = tmp_path / "state/schedules/demo.json"
    path.parent.mkdir(0o700, parents=True)
    path.parent.parent.chmod(0o700)
    path.write_bytes(encode(Schedule(job="demo", kind="cron", expression="daily", installed_at=datetime.now(UTC))))
    path.chmod(0o600)
    assert "oncalendar" in _loaded(code)


def test_a_directory_backup_loads_few_modules():
    loaded = _loaded("import snapmgr.jobrun, snapmgr.backup.run, snapmgr.context, snapmgr.source.locate")
    assert len(_ours(loaded)) <= 55, _ours(loaded)
    # It starts no program.
    assert not {"subprocess", "shlex", "snapmgr.system.command"} & loaded
    others = ("bench", "cli", "doctor", "keep", "restore", "trace", "verify", "physical", "mysql", "retention")
    assert {name for name in loaded if name.startswith(tuple(f"snapmgr.{room}" for room in others))} == set()
    assert {name for name in loaded if name.startswith("snapmgr_")} == set()
    # What took the time: classes built from text, a scan of all installed packages, unused compressors and sockets.
    assert not {"dataclasses", "importlib.metadata", "email", "lzma", "socket", "logging", "csv", "fractions"} & loaded


def test_records_are_read_without_evaluating_the_text_of_annotations():
    # Else the first manifest that a command reads takes as long as twenty.
    for record in (Manifest, Member, Verification, Lease, Summary, StoredPart, SnapshotRef, Pool, Process, Job):
        assert [kind for kind in record.__annotations__.values() if isinstance(kind, str)] == [], record


def test_a_backend_loads_what_makes_storage_when_it_makes_some():
    code = "import snapmgr_btrfs, snapmgr.cli.running, snapmgr.context, snapmgr.api as api"
    assert not {"snapmgr.system.provisioning", "snapmgr.system.command", "subprocess"} & _loaded(code)
    assert "snapmgr.system.provisioning" in _loaded(f"{code}; [getattr(api, name) for name in api.__all__]")


def test_the_backup_of_a_server_loads_few_modules():
    loaded = _loaded("import snapmgr.jobrun, snapmgr.backup.fire_mysql, snapmgr.source.locate_mysql")
    assert "snapmgr.mysql.lock.quiesce" in loaded
    assert len(_ours(loaded)) <= 85, _ours(loaded)
    others = ("bench", "cli", "doctor", "keep", "restore", "verify", "physical", "mysql.server", "mysql.binlog")
    assert {name for name in loaded if name.startswith(tuple(f"snapmgr.{room}" for room in others))} == set()


def test_nothing_is_loaded_while_a_replica_is_stopped():
    files = [ROOT / "snapmgr/backup/fire_mysql.py", *(ROOT / "snapmgr/mysql/lock").glob("*.py")]
    later = {name for file in files for name in _imported_later(file)}
    assert {"random", "snapmgr.mysql.lock.probe_mysql"} <= later
    # A stopped server has no replication; `locate_mysql` loads what freezes a process.
    later -= {"snapmgr.mysql.lock.stopped", "snapmgr.mysql.lock.freeze"}
    code = """if True:
        from types import SimpleNamespace as Some
        from snapmgr.backup.fire_mysql import _stopped_applier
        job = Some(stop_replica=True, lock_attempts=1, max_stall_s=1, blocker_wait_s=0, lock_hold_s=1)
        nothing = dict.fromkeys(("credentials", "abilities", "check"))
        live = Some(channels=("one",), process=Some(pid="1"), **nothing)
        from pathlib import Path
        _stopped_applier(Some(catalog=Some(appliers=Path("/"))), job, live)
    """
    assert later - _loaded(code) == set()


def _imported_later(file):
    """Yield the modules that the functions of a file import; of a package those of its modules."""
    for function in (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)):
        for node in ast.walk(function):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                package = (ROOT / node.module.replace(".", "/")).is_dir()
                yield from (f"{node.module}.{alias.name}" for alias in node.names) if package else (node.module,)


def test_no_room_is_a_drawer():
    for folder in [ROOT / "snapmgr", *(path.parent for path in (ROOT / "snapmgr").rglob("__init__.py"))]:
        files = list(folder.glob("*.py"))
        if folder.name != "cli":
            assert len(files) <= 16, f"{folder} holds {len(files)} Python files"
        summary = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert summary, f"{folder}/__init__.py does not say what lives there"


def test_no_file_is_over_400_lines():
    sources = [*(ROOT / "snapmgr").rglob("*.py"), *(ROOT / "backends").rglob("*.py")]
    long = {str(path.relative_to(ROOT)): n for path in sources if (n := len(path.read_text().splitlines())) > 400}
    assert long == {}


def test_every_backend_is_shipped_registered_and_under_contract():
    names = {path.name for path in BACKENDS}
    assert names
    assert set(PYPROJECT["tool"]["importlinter"]["root_packages"]) == names | {"snapmgr"}
    shipped = PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert set(shipped) == {"snapmgr"} | {f"backends/{name}" for name in names}
    points = PYPROJECT["project"]["entry-points"]["snapmgr.backends"].values()
    assert {point.partition(":")[0] for point in points} == names
    for contract in CONTRACTS.values():
        if "snapmgr" in contract.get("source_modules", ()) and "backend" not in contract["name"]:
            assert set(contract["source_modules"]) == names | {"snapmgr"}


@pytest.mark.parametrize("package", BACKENDS, ids=lambda path: path.name)
def test_backend_starts_no_program_by_itself(package):
    banned = {"system", "popen", "fork", "forkpty", "posix_spawn", "posix_spawnp"}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                assert node.attr not in banned, f"{path}:{node.lineno}"
                assert not node.attr.startswith(("exec", "spawn")), f"{path}:{node.lineno}"


def test_every_ignored_ruff_rule_has_its_reason():
    lines = (ROOT / "pyproject.toml").read_text().partition("[tool.ruff.lint]")[2].partition("# ----")[0].splitlines()
    rules = [line for line in lines if line.startswith('    "')]
    assert len(rules) > 10
    assert [line for line in rules if "#" not in line] == []


def test_locks_name_no_index_and_hash_everything():
    for name in ("runtime", "btrfs", "dev"):
        text = (ROOT / "requirements" / f"{name}.txt").read_text()
        assert "://" not in text
        assert "index-url" not in text
        lines = text.replace("\\\n", "").splitlines()
        entries = [line for line in lines if line and not line.lstrip().startswith("#")]
        assert entries
        assert [entry for entry in entries if "--hash=sha256:" not in entry] == []
