"""Writes the texts of a job's systemd timer and service.

The service is as hardened as mounting allows. Our mounts and unmounts must be visible to all processes, so the service
has no mount namespace of its own, which rules out PrivateTmp, PrivateDevices,
ProtectSystem, ProtectHome, ProtectProc, ProtectKernelTunables, ProtectKernelModules, ProtectKernelLogs,
ProtectControlGroups, ReadOnlyPaths and its like. Most of what these would protect is out of reach without the
capabilities that are dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.config.model import Source

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

CAPABILITIES = (
    "CAP_CHOWN",  # copies keep their owners
    "CAP_DAC_OVERRIDE",  # the server's files belong to the server's user
    "CAP_FOWNER",  # copies keep modes and times
    "CAP_FSETID",  # and set-user-ID bits
    "CAP_KILL",  # freezing the server, ending the throwaway server: other users' processes
    "CAP_LINUX_IMMUTABLE",  # file attributes of copies
    "CAP_MKNOD",  # device nodes and whiteouts in a directory
    "CAP_SETFCAP",  # file capabilities of copies
    "CAP_SETGID",  # the throwaway server runs as the datadir's owner
    "CAP_SETUID",  # the same
    "CAP_SYS_ADMIN",  # mounts, snapshots
    "CAP_SYS_PTRACE",  # /proc/PID of the server: which datadir it has open, its environment
    "CAP_SYS_RESOURCE",  # the process that thaws a frozen server is exempt from the out-of-memory killer
)

# None of these affects mounts. Without CAP_SYS_TIME, CAP_SYS_MODULE, CAP_SYS_RAWIO, CAP_SYS_BOOT and CAP_SYSLOG
# there is nothing to add for ProtectClock (which would also close all devices but the clock) and its like.
_ALWAYS = """\
NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
SystemCallFilter=~@clock @cpu-emulation @debug @module @obsolete @raw-io @reboot @swap
SystemCallErrorNumber=EPERM
"""
# A directory's check command may be any program: one with a just-in-time compiler, one for 32 bits, one that asks a
# server in the network. RestrictSUIDSGID is in neither list: a copy of a tree keeps its set-user-ID bits.
_ONLY_OUR_PROGRAMS = """\
SystemCallArchitectures=native
MemoryDenyWriteExecute=yes
RestrictAddressFamilies=AF_UNIX AF_NETLINK
RestrictNamespaces=mnt
"""


def quote_word(word: str) -> str:
    """Return a word of a command line for ``ExecStart=:`` (systemd.service(5), COMMAND LINES).

    In double quotes, with C escapes and % doubled. $ is not special: the prefix ":" disables variables.
    """
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def timer_text(marker: str, job: str, expression: str, delay_s: float) -> str:
    """Return the timer unit. `expression` is as `read_expression` returns it, `delay_s` the random delay's bound."""
    delay = f"RandomizedDelaySec={delay_s:.0f}s\n" if delay_s else ""
    return f"""\
{marker}
[Unit]
Description=Timer of the snapmgr backup of job {job}

[Timer]
OnCalendar={expression}
# If the machine was off at that time: once, as soon as it runs again.
Persistent=true
AccuracySec=1min
{delay}
[Install]
WantedBy=timers.target
"""


def service_text(marker: str, job: str, command: Sequence[str], source: Source) -> str:
    """Return the service unit that runs `command` for a job with this `source`."""
    return f"""\
{marker}
[Unit]
Description=snapmgr backup of job {job}
# A missed run is made up for at boot, but not before the database has started.
After=local-fs.target mariadb.service mysql.service mysqld.service

[Service]
Type=oneshot
ExecStart=:{" ".join(quote_word(word) for word in command)}
Environment=PATH={PATH}
# SIGTERM goes only to snapmgr, which cleans up: unmounts, ends a server, removes a snapshot. A storage call that hangs
# and the process that thaws a frozen server must outlive it.
KillMode=process
TimeoutStopSec=5min
# If the throwaway server runs out of memory, snapmgr reports a failed verification.
OOMPolicy=continue
OOMScoreAdjust=500
# No Nice, no IOSchedulingClass: slow work under the lock blocks the database.
CapabilityBoundingSet={" ".join(CAPABILITIES)}
{_ALWAYS}{_ONLY_OUR_PROGRAMS if source == "mysql" else ""}"""
