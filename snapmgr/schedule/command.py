"""Builds the command line of a scheduled run, with absolute paths, so that it needs no environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from snapmgr.contract.errors import ConfigError


def own_command(config_path: Path, job: str) -> tuple[str, ...]:
    """Return program and arguments that back up `job` with this installation of snapmgr.

    Raises ConfigError for paths that unit files and crontabs cannot hold.
    """
    words = (*_program(), "--quiet", "--config", os.path.abspath(config_path), "backup", job)
    for word in words:
        if not word.isprintable() or any(0xD800 <= ord(char) <= 0xDFFF for char in word):  # noqa: PLR2004 - surrogates
            raise ConfigError(
                f"the path {word!r} has control characters or is not UTF-8: a schedule cannot contain it",
                hint="rename it",
            )
    return words


def _program() -> tuple[str, ...]:
    # Not resolved: the python of a virtual environment is a symlink, which finds the environment by its own path.
    python = os.path.abspath(sys.executable)
    script = Path(python).with_name("snapmgr")
    if script.is_file() and os.access(script, os.X_OK):
        return (str(script),)
    # -P: do not import a module named snapmgr from the current folder.
    return (python, "-P", "-m", "snapmgr")
