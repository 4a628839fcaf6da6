"""A configuration, a state directory without storage behind it, and the command line called in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapmgr.catalog import Catalog
from snapmgr.cli.main import main
from snapmgr.manifest import Verification
from support.sample import NOW, lease, manifest


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
