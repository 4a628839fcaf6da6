"""What a throwaway server cannot look at: the result is "partly", or none, and never a proof or a failure."""

from __future__ import annotations

import base64
import json
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from support.scene import Scene

pytestmark = pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "mariadbd")

# The definition of `CREATE TABLE r (a INT) ENGINE=ROCKSDB`, written by MariaDB 10.11: no server here has this engine.
FRM = zlib.decompress(
    base64.b64decode(
        "eNr7x8ilK8QQxsDIsJGRgUGAgZUBDpg4GDgYIAIcMDEBIP7fxcggCFclEPMuesazU4If15Qz/QHyGWtg2hn+wxVBWewMQf7O3sEuThCuKaMp"
        "I8OIBiDvczOAApkFLhbAIMYADxZuYDAySDcAWczAOPif+J8BAEJHE9c="
    )
)


@pytest.fixture(name="strange")
def _strange(scene: Scene) -> Scene:
    """A scene with the database "strange", whose only table needs RocksDB."""
    scene.server.query("DROP DATABASE IF EXISTS strange")
    scene.server.query("CREATE DATABASE strange")
    folder = scene.server.datadir / "strange"
    _own(folder / "r.frm", FRM)
    return scene


def _own(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    owner = path.parent.stat()
    os.chown(path, owner.st_uid, owner.st_gid)


def test_a_snapshot_of_which_no_table_could_be_read_gets_no_result(strange: Scene) -> None:
    assert strange.run("backup", "demo").returncode == 0
    done = strange.run("verify", "latest")
    assert done.returncode == 7
    assert "could be looked at: `strange`.`r`: its engine ROCKSDB is not loaded" in done.stderr
    assert strange.entries()[0].verification is None


def test_a_partial_proof_has_its_word_its_exit_status_and_lets_prune_go_on(strange: Scene) -> None:
    strange.server.query("CREATE TABLE strange.t (a INT PRIMARY KEY)")
    # MariaDB has not written its definition yet: without the engine it does not even list the table.
    _own(strange.server.datadir / "strange/unseen.ARZ", b"")
    strange.configure("retention.keep-last = 1\nverify.assertions = ['SELECT COUNT(*) = 1 FROM strange.r']")
    assert strange.run("backup", "demo").returncode == 0
    done = strange.run("backup", "demo", "--verify", "--prune")
    assert done.returncode == 5, done.stderr
    assert "is only partly verified: `strange`.`r`: its engine ROCKSDB is not loaded" in done.stderr
    assert "; partly verified in " in done.stdout
    assert "; 1 pruned" in done.stdout
    (entry,) = strange.entries()
    assert entry.verification is not None
    assert (entry.verification.result, entry.verified, entry.failed) == ("partly", False, False)
    assert entry.verification.unchecked == (
        "`strange`.`r`: its engine ROCKSDB is not loaded",
        "strange/unseen.ARZ: its engine ARCHIVE is not loaded",
        "assertion 1: SELECT COUNT: Unknown storage engine 'ROCKSDB' (error 1286)",
    )
    assert "partly 20" in strange.run("list").stdout
    assert "NOT CHECKED: `strange`.`r`" in strange.run("show", "latest").stdout
    done = strange.run("verify", "latest", "--json")
    assert done.returncode == 7
    document = json.loads(done.stdout)
    assert (document["exit_code"], document["error"]["exit_code"]) == (7, 7)
    assert document["snapshot"]["verification"]["result"] == "partly"
    assert len(document["snapshot"]["verification"]["unchecked"]) == 3
    done = strange.run("status")
    assert "could not look at everything" in done.stdout
