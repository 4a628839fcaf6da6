"""No command loads or asks the kernel for more than it did, unless the committed numbers say so."""

from __future__ import annotations

import pytest

from support import commandcounts


@pytest.mark.needs("root", "loop", "btrfs", "btrfsutil", "strace")
def test_commands_load_and_ask_no_more_than_committed():
    table, good = commandcounts.check(renew=False)
    assert good, table
