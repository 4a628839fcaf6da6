"""The cron file of a job, as text."""

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
    """Return the command line as the shell gets it: what it prints as a result is of no use in a mail."""
    return f"{shlex.join(command)} >/dev/null"


def quote_command(line: str) -> str:
    r"""Return a shell command as it stands in a crontab, where % means a new line and \% means % (crontab(5)).

    Raises ConfigError for one with a backslash, about which the crons do not agree, or one that is too long.
    """
    if "\\" in line:
        raise ConfigError(f"cron cannot run a command with a backslash: {line}", hint="rename the file")
    quoted = line.replace("%", "\\%")
    if len(quoted.encode()) > _LONGEST:
        raise ConfigError(f"cron cannot run a command longer than {_LONGEST} bytes: {line}", hint="use shorter paths")
    return quoted


def cron_text(marker: str, expression: str, command: Sequence[str]) -> str:
    """Return the file for /etc/cron.d. Raises ConfigError for what cron cannot say.

    MAILTO is left to the machine. A run that meets another one of the same job ends with exit code 3 by itself.
    """
    environment = "".join(f"{name}={value}\n" for name, value in ENVIRONMENT.items())
    return f"""\
{marker}
# OnCalendar={expression}
{environment}{cron_fields(expression)} root {quote_command(shell_command(command))}
"""
