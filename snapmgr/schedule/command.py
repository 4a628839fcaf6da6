"""The command line that a scheduled run is: with absolute paths, so that it needs nothing of an environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from snapmgr.contract.errors import ConfigError


def own_command(config_path: Path, job: str) -> tuple[str, ...]:
    """Return program and arguments that back up `job`, by this very installation of snapmgr.

    Raises ConfigError for paths that no unit file and no crontab can hold.
    """
    words = (*_program(), "--quiet", "--config", os.path.abspath(config_path), "backup", job)
    for word in words:
        if not word.isprintable() or any(0xD800 <= ord(char) <= 0xDFFF for char in word):  # noqa: PLR2004 - surrogates
            raise ConfigError(
                f"the path {word!r} has control characters or is not UTF-8: it cannot stand in a schedule",
                hint="rename it",
            )
    return words


def _program() -> tuple[str, ...]:
    # Not resolved: a virtual environment's python is a symlink, and what it is called tells it where it belongs.
    python = os.path.abspath(sys.executable)
    script = Path(python).with_name("snapmgr")
    if script.is_file() and os.access(script, os.X_OK):
        return (str(script),)
    # -P: not whatever is called snapmgr in the folder where it happens to start.
    return (python, "-P", "-m", "snapmgr")
