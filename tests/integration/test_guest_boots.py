"""LVM over a reboot, and with udevd: each in guests of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support import guest
from support.thoroughness import CAMPAIGN

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.needs("user-mode-linux"), pytest.mark.timeout(600)]


def run(name: str, folder: Path, *, udev: bool = False) -> None:
    """Do one of `support.boots` in a guest, which has `folder` and the disk in it."""
    command = ("/usr/bin/env", "PYTHONPATH=tests", ".venv/bin/python", "-m", "support.boots", name, folder)
    done = guest.boot(*command, disk=folder / "disk", keep=folder, udev=udev)
    assert done.returncode == 0, (name, done.stdout, done.stderr)


def test_attachments_of_another_boot_are_cleared_and_all_goes_on(tmp_path: Path) -> None:
    run("before-reboot", tmp_path)
    run("after-reboot", tmp_path)


if CAMPAIGN:  # three minutes

    def test_a_day_with_udevd(tmp_path: Path) -> None:
        run("with-udevd", tmp_path, udev=True)
