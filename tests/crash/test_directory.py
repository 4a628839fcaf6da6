"""Commands on a plain directory, on btrfs and on XFS, killed at each call that changes something."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest

from support.campaign import Command, campaign, report
from support.crashsite import crash_site
from support.thoroughness import CAMPAIGN
from support.tracer import Kill, read_log

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.crashsite import Site

pytestmark = [pytest.mark.timeout(0)]

JOB = """
[job.demo]
source = "directory"
path = "{data}"
[job.demo.retention]
keep-last = 1
[job.demo.verify]
command = ["grep", "-r", "content", "{}"]
"""

COMMANDS = (
    Command(name="first-backup", scene="empty", run=("backup", "demo")),
    Command(name="backup", scene="one", run=("backup", "demo")),
    # Three at once: they are marked, deleted and forgotten together.
    Command(name="prune", scene="four", run=("prune", "demo")),
    Command(name="mount", scene="one", run=("mount", "latest")),
    Command(name="mount-read-only", scene="one", run=("mount", "latest", "--read-only")),
    Command(name="umount", scene="one", run=("umount", "--all"), first=(("mount", "latest"),)),
    Command(name="verify", scene="one", run=("verify", "latest")),
    Command(
        name="restore",
        scene="one",
        run=("restore", "latest", "{top}/restored"),
        # It refuses to write over what is there, and the first may be complete.
        again=(("restore", "latest", "{top}/restored-again"),),
    ),
    # Again would be another one.
    Command(name="delete", scene="three", run=("delete", "--force", "--yes", "latest"), again=()),
    Command(name="pin", scene="one", run=("pin", "latest", "--reason", "why")),
    Command(name="unpin", scene="pinned", run=("unpin", "latest")),
    Command(
        name="schedule-install",
        scene="one",
        run=("schedule", "install", "demo", "--on-calendar", "02:30", "--systemd", "--yes"),
        last=(
            ("schedule", "install", "demo", "--on-calendar", "03:30", "--systemd", "--yes"),
            ("schedule", "show"),
            ("schedule", "remove", "demo"),
        ),
        own_etc=True,
    ),
    Command(name="doctor-fix", scene="mess", run=("doctor", "--fix")),
    Command(name="doctor-fix-rebuild", scene="no-state", run=("doctor", "--fix")),
)

# A campaign tries all: those that change little, and what another storage's own code is not in.
_LITTLE = {"first-backup", "mount-read-only", "umount", "pin", "unpin", "schedule-install"}
_STORED = {"backup", "restore"}
COMMANDS_HERE = tuple(command for command in COMMANDS if CAMPAIGN or command.name not in _LITTLE)
COMMANDS_ELSEWHERE = tuple(command for command in COMMANDS if CAMPAIGN or command.name in _STORED)

# A mess for doctor: commands that were killed, each at this share of its calls.
MESS = (
    (("backup", "demo"), 0.6),
    (("verify", "latest"), 0.4),
    (("mount", "latest"), 0.4),
    (("restore", "latest", "{top}/restored"), 0.5),
    (("delete", "--force", "--yes", "{oldest}"), 0.5),
)


def _fill(site: Site) -> None:
    """Make data of every kind that a copy has to keep."""
    folder = site.data / "folder"
    folder.mkdir()
    (folder / "file").write_text("content" * 1000)
    (folder / "file").chmod(0o640)
    os.chown(folder / "file", 1, 1)
    os.setxattr(folder / "file", "user.mark", b"1")
    (site.data / "hard link").hardlink_to(folder / "file")
    (site.data / "symlink").symlink_to("folder/file")


def _scenes(site: Site) -> None:
    site.configure(JOB)
    _fill(site)
    site.save("empty")
    site.backup()
    site.strangers()
    site.save("one")
    site.backup()
    site.backup()
    site.save("three")
    site.backup()
    site.save("four")
    site.restore("three")
    for arguments, share in MESS:
        _crash(site, [word.replace("{oldest}", site.look().ready[0]) for word in arguments], share)
    site.save("mess")
    site.restore("three")
    shutil.rmtree(site.state)
    site.save("no-state")
    site.restore("one")
    site.must("pin", "latest")
    site.save("pinned")


def _crash(site: Site, arguments: list[str], share: float) -> None:
    """Kill a command with all its children at that share of its calls; what it mounted stays only in its lease."""
    site.save("here")
    log = site.work / "calls"
    assert site.run(*arguments, log=log).returncode == 0
    calls = read_log(log).calls
    site.restore("here")
    site.run(*arguments, kill=Kill(call=calls[int(len(calls) * share)]))


@pytest.fixture(scope="module")
def btrfs_site() -> Iterator[Site]:
    # On a file system of its own: one that loses its power at the same instant, and comes back without knowing it.
    with crash_site("btrfs", state_apart=True) as site:
        _scenes(site)
        yield site


@pytest.fixture(scope="module")
def xfs_site() -> Iterator[Site]:
    with crash_site("xfs", state_apart=False) as site:
        _scenes(site)
        yield site


@pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "ext4", "xfs")
@pytest.mark.parametrize("command", COMMANDS_HERE, ids=lambda command: command.name)
def test_on_btrfs(btrfs_site: Site, command: Command) -> None:
    tally = campaign(btrfs_site, command, label=f"directory, btrfs: {command.name}")
    assert not tally.failures, report(tally)


@pytest.mark.needs("root", "loop", "xfs")
@pytest.mark.parametrize("command", COMMANDS_ELSEWHERE, ids=lambda command: command.name)
def test_on_xfs(xfs_site: Site, command: Command) -> None:
    tally = campaign(xfs_site, command, label=f"directory, XFS: {command.name}")
    assert not tally.failures, report(tally)
