"""A directory job on JuiceFS by the command line, from the backup to the deletion, and what doctor says of it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from snapmgr.testing import fingerprint, plant
from snapmgr.testing.trees import same
from support import faults
from support.juicefs import JuicefsVolume

pytestmark = pytest.mark.needs("root", "juicefs")


class _Job:
    def __init__(self, volume: JuicefsVolume) -> None:
        self.folder = volume.folder / f"job-{time.monotonic_ns()}"
        self.folder.mkdir()
        self.origin = volume.point / f"data-{time.monotonic_ns()}"
        self.origin.mkdir()
        self.dumps = self.folder / "dumps"
        self.dumps.mkdir()
        self.config = self.folder / "snapmgr.toml"
        self.config.write_text(
            f'state_dir = "{self.folder}/state"\nscratch_dir = "{self.folder}/scratch"\n'
            f'[job.files]\nsource = "directory"\npath = "{self.origin}"\nbackend = "auto"\n'
            'verify = { command = ["test", "-s", "{}/plain"] }\n'
            f'retention.keep-last = 1\n[backend.juicefs]\nmetadata_dumps = "{self.dumps}"\n'
        )

    def run(self, *arguments: str) -> str:
        done = faults.run(self.config, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def states(self) -> list[str]:
        return [one["state"] for one in json.loads(self.run("list", "--json"))["snapshots"]]


def test_backup_to_delete(volume: JuicefsVolume, tmp_path: Path) -> None:
    job = _Job(volume)
    plant(job.origin)
    before = fingerprint(job.origin)
    assert "one metadata engine" in job.run("backup", "files"), "there is no dump"
    (job.dumps / "today.json.gz").write_bytes(b"a dump")
    same(before, fingerprint(job.origin))

    assert "proved restorable" in job.run("verify", "latest")
    job.run("mount", "latest", str(tmp_path / "at"))
    same(before, fingerprint(tmp_path / "at"))
    (tmp_path / "at" / "plain").write_bytes(b"in the clone alone")
    job.run("umount", str(tmp_path / "at"))
    job.run("restore", "latest", str(tmp_path / "back"))
    assert (tmp_path / "back" / "plain").read_bytes() == (job.origin / "plain").read_bytes()

    assert "one metadata engine" not in job.run("backup", "files")
    assert job.states() == ["ready", "ready"]
    job.run("prune")
    # The newest that is verified is kept, too.
    assert job.states() == ["ready", "ready"]
    assert "one metadata engine" not in job.run("doctor")
    job.run("delete", "latest", "--force", "--yes")
    job.run("delete", "latest", "--force", "--yes")
    assert job.states() == []
    store = volume.point / ".snapmgr-juicefs"
    assert [path.name for path in store.iterdir()] == ["snapmgr-juicefs-store.json"]
