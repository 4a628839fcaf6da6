"""A configuration, a state directory without storage behind it, and the command line called in this process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from snapmgr.catalog.manifest import Verification
from snapmgr.catalog.store import Catalog
from snapmgr.cli.main import main
from support.processes import children
from support.sample import NOW, lease, manifest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "source").mkdir()
    path = tmp_path / "snapmgr.toml"
    path.write_text(
        f'state_dir = "{tmp_path}/state"\nscratch_dir = "{tmp_path}/scratch"\n'
        f'[job.nightly]\nsource = "directory"\npath = "{tmp_path}/source"\nretention.keep-last = 1\n'
    )
    return path


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    catalog = Catalog(tmp_path / "state")
    catalog.make()
    for number in range(3):
        catalog.write(manifest(number))
    passed = Verification(at=NOW, result="passed", duration_s=2.5, checks=("it started",))
    failed = Verification(at=NOW, result="failed", duration_s=2.5, failures=("it did not",))
    catalog.write_verification(manifest(0).id, passed)
    catalog.write_verification(manifest(1).id, failed)
    catalog.write_lease(lease(manifest(0)))
    return catalog


@pytest.fixture
def run(config, capsys):
    def run(*arguments: str, options: tuple[str, ...] = ()) -> tuple[int, str, str]:
        code = main(["--config", str(config), *options, *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def no_child_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a child process behind, be it a zombie, unless it is marked `leaves_child`."""
    before = children()
    yield
    if "leaves_child" not in request.keywords:
        assert children() <= before, "a child was neither ended nor reaped"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes the main file and files of conf.d, and returns the main file's path."""

    def write(main: str, **conf_d: str) -> Path:
        path = tmp_path / "snapmgr.toml"
        path.write_text(main)
        path.chmod(0o644)
        if conf_d:
            (tmp_path / "conf.d").mkdir(mode=0o755)
        for name, text in conf_d.items():
            (tmp_path / "conf.d" / f"{name}.toml").write_text(text)
        return path

    return write
