"""Guests with device-mapper, from outside: for what takes more than one boot, and for tests of the guest itself."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

LAUNCHER = Path(__file__).parents[2] / "vagrant" / "uml.py"


def command_line(
    *command: str | Path, disk: Path | None = None, keep: Path | None = None, udev: bool = False, limit_s: float = 300.0
) -> list[str]:
    """Return the program and arguments that boot a guest and run `command` in it.

    Args:
        command: what is run in the checkout, as root.
        disk: the scratch disk, kept; a fresh one by default. Two boots with the same one are a reboot.
        keep: a folder that the guest sees at the same path and may write to.
        udev: whether systemd-udevd runs.
        limit_s: after so many seconds it is killed.
    """
    options = [f"--time-limit={limit_s}"]
    options += [f"--disk={disk}"] if disk else []
    options += [f"--keep={keep}"] if keep else []
    options += ["--udev"] if udev else []
    return [str(LAUNCHER), *options, "--", *(str(word) for word in command)]


def boot(
    *command: str | Path,
    disk: Path | None = None,
    keep: Path | None = None,
    udev: bool = False,
    limit_s: float = 300.0,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command in a guest to its end; see `command_line`. Its exit code is the command's, or see `--help`."""
    argv = command_line(*command, disk=disk, keep=keep, udev=udev, limit_s=limit_s)
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, env=env)
