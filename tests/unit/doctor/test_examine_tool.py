"""What doctor says of a physical job's tool."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from snapmgr.doctor import examine as doctor
from snapmgr.physical import run

JOB = SimpleNamespace(name="staged", after_backup=(), verify=SimpleNamespace(server=None))
IDENTITY = SimpleNamespace(flavor="mysql", version="8.4.3", pid=1, datadir="/var/lib/mysql")


@pytest.mark.parametrize(("tool", "untried"), [("xtrabackup", True), ("clone", False), ("mariadb-backup", False)])
def test_a_tool_that_was_never_run_is_named(monkeypatch, tool, untried):
    plan = SimpleNamespace(
        live=SimpleNamespace(identity=IDENTITY), tool=SimpleNamespace(name=tool), words=f"{tool} fetches all data"
    )
    monkeypatch.setattr(run, "plan_tool_backup", lambda _ctx, _job: plan)
    monkeypatch.setattr(doctor, "_examine_program", lambda _job, _find: iter(()))
    notes = [one for one in doctor._examine_tool(None, JOB) if one.level == "note"]
    assert ["never run with the real xtrabackup" in one.what for one in notes] == [True] * untried
    assert all('tool = "clone"' in one.hint for one in notes)
