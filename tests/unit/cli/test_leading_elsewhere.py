"""A manifest whose paths lead out of its snapshot: every command refuses it."""

from __future__ import annotations

import json

import pytest

from support.sample import manifest


@pytest.mark.parametrize("subpath", ["../..", "/etc"])
@pytest.mark.parametrize("command", ["mount", "verify", "prepare", "clone", "restore", "show", "delete", "pin"])
def test_every_command_refuses_the_manifest(run, catalog, tmp_path, command, subpath):
    of = manifest(1)
    path = catalog.path / "snapshots" / of.id / "manifest.json"
    document = json.loads(path.read_text())
    document["members"][0]["subpath"] = subpath
    path.write_text(json.dumps(document))
    before = path.read_bytes()
    code, out, err = run(command, of.id, *([str(tmp_path / "new")] if command in ("restore", "clone") else []))
    assert code != 0
    assert out == ""
    assert f"{path} is damaged: members[0].subpath is not a name or path that may be there" in err
    assert path.read_bytes() == before
    assert not (tmp_path / "new").exists()
