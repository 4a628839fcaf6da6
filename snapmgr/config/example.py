"""Writes the commented configuration of ``snapmgr config init``."""

from __future__ import annotations

import json

from snapmgr.contract.errors import ConfigError

_HEAD = """\
# snapmgr's configuration. Check it with `snapmgr config validate` and `snapmgr doctor`.
# Every *.toml in conf.d beside this file is read as well. docs/reference/configuration.md explains each key.

# state_dir = "/var/lib/snapmgr"       # one manifest for each snapshot
# scratch_dir = "/run/snapmgr"         # where snapshots are mounted

# Defaults for all jobs.
[defaults]
backend = "auto"                       # or the storage's name: "btrfs", "reflink", …
after_backup = []                      # ["verify", "prune"] proves each snapshot and deletes old ones
# max_age = "26h"                      # `snapmgr status` reports a job whose newest snapshot is older
# grace = "1h"                         # … or still missing this long after its time in `snapmgr schedule`
# capacity_warn = "80%"                # … and storage that is fuller than this (LVM only) …
# capacity_warn_within = "24h"         # … or will be full within this time

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
[job.mysql]
source = "mysql"
{way}
{datadir}
quiesce = "auto"                       # or "backup-lock", "global-read-lock", "freeze-process", "stopped", …
position = "exact"                     # the binlog position; "none": a weaker lock, or none, may be enough
blocker_wait = "1m"                    # how long to wait first for sessions that would block the lock …
# kill_selects_after = "10m"           # … and SELECTs that are older are killed
# stop_replica = true                  # stop a replica's applier during the snapshot
lock_wait = "3s"                       # how long the last attempt may wait for the lock …
lock_attempts = 5                      # … and how many attempts
lock_hold = "10s"                      # the lock is released after this, whatever happens

# A throwaway server on a writable clone proves that a snapshot restores.
[job.mysql.verify]
check = "quick"                        # CHECK TABLE … QUICK; or "extended", "none"
tables = "all"                         # or a sample: "20%"
time_limit = "30m"
memory = "256M"
# assertions = ["SELECT COUNT(*) > 0 FROM shop.orders"]
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


def example_config(*, socket: str | None = None, datadir: str | None = None, defaults_file: str | None = None) -> str:
    """Return a commented configuration for the server found here, which is valid without changes.

    With neither `socket` nor `defaults_file` its MySQL job is commented out. With both, the defaults file is
    used and the socket becomes a comment. Raises ConfigError for a path that TOML cannot hold (one that is not UTF-8).
    """
    setting = f"datadir = {_quote(datadir or '/var/lib/mysql')}"
    shown_datadir = _align(setting if datadir else f"# {setting}", "only to cross-check the server's answer")
    if defaults_file is not None:
        way = _align(f"defaults_file = {_quote(defaults_file)}", "user, password, socket; readable only by its owner")
        if socket is not None:
            way += f"\n# socket = {_quote(socket)}"
    else:
        way = _align(f"socket = {_quote(socket or '/run/mysqld/mysqld.sock')}", "logs in as the user below …")
        way += "\n" + _align('# user = "root"', "… through unix_socket; default: the user who runs snapmgr")
        way += "\n" + _align('# defaults_file = "/etc/snapmgr/my.cnf"', "instead, for a password")
    mysql = _MYSQL.format(way=way, datadir=shown_datadir)
    if socket is None and defaults_file is None:
        mysql = "# No MySQL or MariaDB server was found here; an example:\n" + _comment_out(mysql)
    physical = f"# With the server's own backup tool:\n{_comment_out(_PHYSICAL)}"
    return f"{_HEAD}\n{mysql}\n{physical}\n# A plain directory:\n{_comment_out(_DIRECTORY)}"


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
