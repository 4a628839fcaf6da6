"""Writes the text of a job's cron file."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from snapmgr.contract.errors import ConfigError
from snapmgr.schedule.systemd import PATH
from snapmgr.schedule.times import cron_fields

if TYPE_CHECKING:
    from collections.abc import Sequence

# cron's own limit for a command (MAX_COMMAND), with room for its end.
_LONGEST = 990
ENVIRONMENT = {"SHELL": "/bin/sh", "PATH": PATH}


def shell_command(command: Sequence[str]) -> str:
    """Return the command line for the shell; results on stdout are discarded, as they are of no use in a mail."""
    return f"{shlex.join(command)} >/dev/null"


def quote_command(line: str) -> str:
    r"""Return a shell command quoted for a crontab, where % is a newline and \% is % (crontab(5)).

    Raises ConfigError for a command with a backslash, which crons read differently, or one that is too long.
    """
    if "\\" in line:
        raise ConfigError(f"cron cannot run a command with a backslash: {line}", hint="rename the file")
    quoted = line.replace("%", "\\%")
    if len(quoted.encode()) > _LONGEST:
        raise ConfigError(f"cron cannot run a command longer than {_LONGEST} bytes: {line}", hint="use shorter paths")
    return quoted


def cron_text(marker: str, expression: str, command: Sequence[str]) -> str:
    """Return the file for /etc/cron.d. Raises ConfigError if cron cannot express the schedule.

    MAILTO is left to the machine. A run that finds another run of the same job ends by itself, with exit code 3.
    """
    environment = "".join(f"{name}={value}\n" for name, value in ENVIRONMENT.items())
    return f"""\
{marker}
# OnCalendar={expression}
{environment}{cron_fields(expression)} root {quote_command(shell_command(command))}
"""
