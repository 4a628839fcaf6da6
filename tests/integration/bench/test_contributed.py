"""The benchmark measures the storage of the guide's backend, which is installed as any plugin is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from snapmgr.bench.results.samples import read

_GUIDE = Path(__file__).parents[3] / "docs" / "how-to" / "write-a-backend.md"


@pytest.fixture
def snapmgr(tmp_path):
    """The command, with the guide's package installed."""
    packages = tmp_path / "packages"
    facts = packages / "snapmgr_copy-0.1.dist-info"
    facts.mkdir(parents=True)
    text = _GUIDE.read_text(encoding="utf-8")
    (packages / "my_backend.py").write_text(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)[0])
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: snapmgr-copy\nVersion: 0.1\n")
    (facts / "entry_points.txt").write_text("[snapmgr.backends]\ncopy = my_backend:CopyBackend\n")

    def run(*words):
        return subprocess.run(
            [sys.executable, "-m", "snapmgr", *words],
            env=os.environ | {"PYTHONPATH": str(packages)},
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    return run


@pytest.mark.needs("root", "loop", "ext4", "fio")
def test_the_guides_storage_is_listed_measured_and_removed(snapmgr, tmp_path):
    listed = json.loads(snapmgr("bench", "list", "--json").stdout)["stacks"]
    assert {"name": "copy+ext4", "title": "ext4, plain copies by cp", "missing": []}.items() <= next(
        one for one in listed if one["name"] == "copy+ext4"
    ).items()
    words = ["random-update", "--stacks", "copy+ext4", "--profile", "smoke", "--repeats", "1"]
    results = tmp_path / "results"
    done = snapmgr("bench", "run", *words, "--size", "16M", "--budget", "5m", "--on", str(tmp_path), "-o", str(results))
    assert done.returncode == 0, done.stderr
    samples = read([results]).samples
    assert sorted((one["stack"], one["kind"]) for one in samples) == [
        ("copy+ext4", kind) for kind in ("a/a", "measured", "pilot")
    ]
    for one in samples:
        assert one["failure"] == ""
        assert one["checks"]
        assert all(check["ok"] for check in one["checks"])
        assert one["guarantee"] == {"atomicity": "file", "clone": "native", "survives_origin": True}
        assert one["metrics"]["create_s"] > 0
    assert list(Path("/run/snapmgr/bench").glob("*")) == []
