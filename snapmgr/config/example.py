"""Writes the commented configuration of ``snapmgr config init``."""

from __future__ import annotations

import json
import re
from itertools import count
from typing import TYPE_CHECKING

from snapmgr.config.model import RESERVED_JOB_NAMES
from snapmgr.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

# Names of folders that many servers have: a job is not named after them.
_TELLS_NOTHING = RESERVED_JOB_NAMES | {"", "data", "datadir", "db", "lib", "mariadb", "mysql", "mysqld", "srv", "var"}
_NO_NAME = re.compile("[^A-Za-z0-9_-]+")
# Leaves room for a number: the limit is 48.
_NAME_LENGTH = 40

_HEAD = """\
# snapmgr's configuration. Check it with `snapmgr config validate` and `snapmgr doctor`.
# Every *.toml in conf.d beside this file is read as well. docs/reference/configuration.md explains each key.

# state_dir = "/var/lib/snapmgr"       # one manifest for each snapshot
# scratch_dir = "/run/snapmgr"         # where snapshots are mounted

# Defaults for all jobs.
[defaults]
backend = "auto"                       # or the storage's name: "btrfs", "reflink", …
# After each snapshot: prove on a clone that it restores, then delete what retention below does not keep. Without
# "verify" nobody knows whether a snapshot can be used; without "prune" the storage fills up.
after_backup = ["verify", "prune"]
# max_age = "26h"                      # `snapmgr status` reports a job whose newest snapshot is older
# grace = "1h"                         # … or still missing this long after its time in `snapmgr schedule`
# capacity_warn = "80%"                # … and storage that is fuller than this …
# capacity_warn_within = "24h"         # … or will be full within this time
# free_min = "5%"                      # with less free, a backup prunes first, or refuses

# Retention rules decide what is kept (UTC, ISO weeks). Without rules `prune` deletes nothing.
[defaults.retention]
keep-last = 3
keep-hourly = 24
keep-daily = 7
keep-weekly = 4
keep-monthly = 12
# keep-yearly = 3
# keep-within = "2d"
"""

_MYSQL = """\
[job.{name}]
source = "mysql"
{way}
{datadir}
quiesce = "auto"                       # or "backup-lock", "global-read-lock", "freeze-process", "stopped", …
{position}
blocker_wait = "1m"                    # how long to wait first for sessions that would block the lock …
# blocker_age = "1s"                   # … they count once they have run for this long …
# kill_selects_after = "10m"           # … and SELECTs that are older are killed
# stop_replica = true                  # stop a replica's applier during the snapshot
max_stall = "3s"                       # how long the last attempt may wait for the lock …
lock_attempts = 5                      # … and how many attempts
lock_hold = "10s"                      # the lock is released after this, whatever happens

# A throwaway server on a writable clone proves that a snapshot restores.
[job.{name}.verify]
check = "quick"                        # CHECK TABLE … QUICK; or "extended", "none"
tables = "all"                         # or a sample: "20%"
time_limit = "30m"
memory = "256M"
# assertions = ["SELECT COUNT(*) > 0 FROM shop.orders"]
"""

_POSITION = 'position = "exact"                     # the binlog position, exact or no snapshot; or "best"'
_BEST = 'position = "best"                      # log_bin is off: no binlog position, no point-in-time recovery'

_FURTHER = """\
[job.{name}]                           # each key of [job.{first}] can be set here, too
source = "mysql"
{way}
{datadir}
{position}
"""

_PHYSICAL = """\
[job.staged]
source = "physical"
socket = "/run/mysqld/mysqld.sock"
staging = "/mnt/volume/staging"        # on JuiceFS, XFS, btrfs or LVM; the server's own tool writes here
tool = "auto"                          # or "mariadb-backup", "xtrabackup" (untried), "clone"
mode = "incremental"                   # or "full"
parallel = 4
# throttle = "50M"                     # bytes a second
# tool_options = ["--kill-long-queries-timeout=20"]
# checksums = true                     # the seal reads all files
# tool_time_limit = "1d"
# [job.staged.prepare]                 # as `snapmgr prepare --tune` finds it
"""

_DIRECTORY = """\
[job.files]
source = "directory"
path = "/srv/files"
after_backup = ["verify"]
verify.command = ["test", "-e", "{}/README"]      # {} is the clone's path
"""


def example_config(
    servers: Sequence[tuple[str, str | None]] = (),
    *,
    defaults_file: str | None = None,
    without_binlog: Container[str] = (),
) -> str:
    """Return a commented configuration with a job for each server, which is valid without changes.

    A server is its socket and its datadir, None if that is unknown. Without one the MySQL job is commented out. With
    `defaults_file`, which names its server itself, there is one job. The servers whose sockets are in `without_binlog`
    write no binary log: their jobs ask for no exact position. Raises ConfigError for a path that TOML cannot hold (one
    that is not UTF-8).
    """
    if not servers:
        job = _MYSQL.format(
            name="mysql", way=_login_by("/run/mysqld/mysqld.sock"), datadir=_cross_check(None), position=_POSITION
        )
        jobs = ["# No MySQL or MariaDB server was found here; an example:\n" + _comment_out(job)]
    elif defaults_file is not None:
        way = _align(f"defaults_file = {_quote(defaults_file)}", "user, password, socket; readable only by its owner")
        ((socket, datadir), *_) = servers
        position = _BEST if socket in without_binlog else _POSITION
        jobs = [_MYSQL.format(name="mysql", way=way, datadir=_cross_check(datadir), position=position)]
    else:
        names = job_names([datadir for _, datadir in servers])
        (socket, datadir), *further = servers
        position = _BEST if socket in without_binlog else _POSITION
        jobs = [_MYSQL.format(name=names[0], way=_login_by(socket), datadir=_cross_check(datadir), position=position)]
        jobs += [
            _FURTHER.format(
                name=name,
                first=names[0],
                way=f"socket = {_quote(socket)}",
                datadir=_cross_check(datadir),
                position=_BEST if socket in without_binlog else f"# {_POSITION}",
            )
            for name, (socket, datadir) in zip(names[1:], further, strict=True)
        ]
    physical = f"# With the server's own backup tool:\n{_comment_out(_PHYSICAL)}"
    return "\n".join([_HEAD, *jobs, physical, f"# A plain directory:\n{_comment_out(_DIRECTORY)}"])


def job_names(datadirs: Sequence[str | None]) -> list[str]:
    """Return a job name for each server: "mysql" for a single one, else the telling folder of its datadir. Pure."""
    names: list[str] = []
    for datadir in datadirs if len(datadirs) > 1 else [None]:
        folders = reversed((datadir or "").split("/"))
        cleaned = (_NO_NAME.sub("-", folder).strip("-_")[:_NAME_LENGTH] for folder in folders)
        name = next((one for one in cleaned if one.lower() not in _TELLS_NOTHING), "mysql")
        taken = {one for one in names if one == name or one.startswith(f"{name}-")}
        names.append(name if name not in taken else next(f"{name}-{n}" for n in count(2) if f"{name}-{n}" not in taken))
    return names


def _login_by(socket: str) -> str:
    return "\n".join(
        (
            _align(f"socket = {_quote(socket)}", "logs in as the user below …"),
            _align('# user = "root"', "… through unix_socket; default: the user who runs snapmgr"),
            _align('# defaults_file = "/etc/snapmgr/my.cnf"', "instead, for a password"),
        )
    )


def _cross_check(datadir: str | None) -> str:
    setting = f"datadir = {_quote(datadir or '/var/lib/mysql')}"
    return _align(setting if datadir else f"# {setting}", "only to cross-check the server's answer")


def _align(setting: str, comment: str) -> str:
    return f"{setting:<38} # {comment}"


def _comment_out(text: str) -> str:
    return "".join(
        f"# {line}\n" if line and not line.startswith("#") else f"{line or '#'}\n" for line in text.splitlines()
    )


def _quote(text: str) -> str:
    """Return `text` as a TOML basic string."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{text!r} is not UTF-8, so TOML cannot hold it", hint="rename it") from error
    # TOML has JSON's escapes; in addition DEL must be escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
