"""The benchmark measures the storage of the guide's backend, which is installed as any plugin is."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from snapmgr.bench.model import Parameters
from snapmgr.bench.scenarios.random_update import scenario
from snapmgr.cli.main import main
from support.bench.device import scenario_bench

_GUIDE = Path(__file__).parents[3] / "docs" / "how-to" / "write-a-backend.md"
_GIVEN = Parameters(profile="smoke", variant="database", size_bytes=16 << 20, memory_bytes=1 << 60, seed=1)


@pytest.fixture
def snapmgr(tmp_path, monkeypatch, capsys):
    """The command, with the guide's package installed."""
    packages = tmp_path / "packages"
    facts = packages / "snapmgr_copy-0.1.dist-info"
    facts.mkdir(parents=True)
    text = _GUIDE.read_text(encoding="utf-8")
    (packages / "my_backend.py").write_text(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[0])
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: snapmgr-copy\nVersion: 0.1\n")
    (facts / "entry_points.txt").write_text("[snapmgr.backends]\ncopy = my_backend:CopyBackend\n")
    monkeypatch.syspath_prepend(str(packages))

    def run(*words):
        assert main([*words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    yield run
    sys.modules.pop("my_backend", None)


@pytest.mark.needs("root", "loop", "ext4", "fio")
def test_the_guides_storage_is_listed_measured_and_removed(snapmgr):
    listed = {one["name"]: one for one in snapmgr("bench", "list")["stacks"]}
    assert listed["copy+ext4"] == {"name": "copy+ext4", "title": "ext4, plain copies by cp", "missing": []}
    planned = snapmgr("bench", "run", "random-update", "--stacks", "copy+ext4", "--profile", "smoke", "--dry-run")
    assert planned["absent"] == []
    assert planned["steps"][0]["stacks"] == ["copy+ext4"]
    # One sample, as the run takes it. On leaving, nothing holds the device.
    with scenario_bench("copy+ext4", scenario.parameters(_GIVEN), 320 << 20) as bench:
        found = scenario.run(bench)
        mount = bench.path
        promised = bench.record()["guarantee"]
    assert found.checks
    assert all(check.ok for check in found.checks)
    assert found.metrics["create_s"] > 0
    assert promised == {"atomicity": "file", "clone": "native", "survives_origin": True}
    assert not mount.exists()
