"""Commands on a running server: by lock on btrfs, by freezing the process on XFS, there a set of two volumes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.campaign import Command, campaign, report
from support.crashsite import crash_site

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.crashsite import Kind, Site

pytestmark = [pytest.mark.timeout(0)]

JOB = """
[job.demo]
source = "mysql"
socket = "{socket}"
user = "root"
[job.demo.retention]
keep-last = 2
"""
FREEZE = JOB.replace('user = "root"', 'user = "root"\nquiesce = "freeze-process"')

COMMANDS = (Command(name="backup", scene="one", run=("backup", "demo")),)
MORE = (
    Command(name="verify", scene="one", run=("verify", "latest")),
    Command(name="prepare", scene="one", run=("prepare", "latest")),
)


def _site(kind: Kind, job: str) -> Iterator[Site]:
    with crash_site(kind, state_apart=kind == "xfs", server=True) as site:
        assert site.server is not None
        site.configure(job.replace("{socket}", site.server.socket))
        site.backup()
        site.strangers()
        site.save("one")
        yield site


@pytest.fixture(scope="module")
def btrfs_site() -> Iterator[Site]:
    yield from _site("btrfs", JOB)


@pytest.fixture(scope="module")
def xfs_site() -> Iterator[Site]:
    yield from _site("xfs", FREEZE)


@pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "xfs", "mariadbd")
@pytest.mark.parametrize("command", [*COMMANDS, *MORE], ids=lambda command: command.name)
def test_by_lock_on_btrfs(btrfs_site: Site, command: Command) -> None:
    tally = campaign(btrfs_site, command, label=f"server, lock, btrfs: {command.name}")
    assert not tally.failures, report(tally)


@pytest.mark.needs("root", "loop", "ext4", "xfs", "mariadbd")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_by_freezing_on_xfs(xfs_site: Site, command: Command) -> None:
    tally = campaign(xfs_site, command, label=f"server, frozen, XFS: {command.name}")
    assert not tally.failures, report(tally)
