"""The units and the cron file, as they are written."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapmgr.schedule.cron import cron_text
from snapmgr.schedule.machine import marker
from snapmgr.schedule.systemd import service_text, timer_text

FOLDER = Path(__file__).parent / "schedule"
COMMAND = ("/opt/snap mgr/bin/snapmgr", "--quiet", "--config", "/etc/100% $HOME/snapmgr.toml", "backup", "nightly")
LINE = marker("nightly")
TEXTS = {
    "mysql.service": service_text(LINE, "nightly", COMMAND, "mysql"),
    "directory.service": service_text(LINE, "nightly", COMMAND, "directory"),
    "plain.timer": timer_text(LINE, "nightly", "Mon..Fri 02:30", 0.0),
    "delayed.timer": timer_text(LINE, "nightly", "02:30 Europe/Berlin", 900.0),
    "crontab": cron_text(LINE, "Mon..Fri 02:30", COMMAND),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_is_the_recorded_one(name):
    # A change here is a change on everybody's machine: look at it, then write the file anew.
    assert TEXTS[name] == (FOLDER / name).read_text()


def test_nothing_is_recorded_that_is_not_written():
    assert {path.name for path in FOLDER.iterdir()} == set(TEXTS)
