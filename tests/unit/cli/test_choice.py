"""Commands that rely on a snapshot's content refuse one whose verification failed."""

from __future__ import annotations

import sys
from io import StringIO

import pytest

from support.sample import manifest

# The second of the fixture's three snapshots failed.
FAILED = manifest(1)


@pytest.mark.usefixtures("catalog")
@pytest.mark.parametrize("dry_run", [(), ("--dry-run",)])
@pytest.mark.parametrize("command", ["restore", "clone", "prepare"])
def test_one_that_failed_is_refused(run, tmp_path, command, dry_run):
    code, _, said = run(command, FAILED.short_id, str(tmp_path / "new"), *dry_run)
    assert code == 6
    assert f"error: snapshot {FAILED.id} failed its verification: it did not" in said
    assert "use nightly@latest; or, to use this one nevertheless, add --unverified" in said
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("catalog")
def test_in_place_refuses_it_too(run):
    code, _, said = run("restore", FAILED.short_id, "--in-place", "--yes")
    assert (code, "failed its verification" in said) == (6, True)


@pytest.mark.usefixtures("catalog")
@pytest.mark.parametrize("command", ["clone", "prepare"])
def test_unverified_uses_it_with_a_warning(run, tmp_path, command):
    code, out, said = run(command, FAILED.short_id, str(tmp_path / "new"), "--unverified", "--dry-run")
    assert (code, FAILED.id in out) == (0, True), said
    assert f"warning: snapshot {FAILED.id} failed its verification: it did not" in said


class _Terminal(StringIO):
    def isatty(self):
        return True


@pytest.mark.usefixtures("catalog")
def test_a_terminal_is_asked(run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", _Terminal("no\n"))
    code, _, said = run("clone", FAILED.short_id, str(tmp_path / "new"))
    assert (code, "nothing was done" in said) == (1, True)
    # After the right word it goes on, to the storage that the sample does not have.
    monkeypatch.setattr(sys, "stdin", _Terminal(f"{FAILED.short_id}\n"))
    code, _, said = run("prepare", FAILED.short_id, str(tmp_path / "new"))
    assert code != 6
    assert "Type" in said
    assert "nothing was done" not in said


@pytest.mark.usefixtures("catalog")
def test_one_that_failed_may_be_examined(run):
    assert run("mount", FAILED.short_id, "--dry-run")[0] == 0
    code, out, _ = run("show", FAILED.short_id)
    assert (code, "FAILED" in out) == (0, True)
