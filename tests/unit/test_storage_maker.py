"""What makes file systems for the benchmark: the programs that it runs."""

from __future__ import annotations

from snapmgr import provisioning
from snapmgr.api import Completed, ProvisionOrder, StorageMaker


class _Runner:
    def __init__(self):
        self.ran = []

    def run(self, argv, *, ok=(0,), timeout_s=60.0):  # noqa: ARG002 - as it is called
        self.ran.append(tuple(argv))
        return Completed(argv=tuple(argv), returncode=0, stdout="", stderr="")


class _Mounter:
    def mounts(self):
        return ()


def test_a_discard_ends_where_the_order_does_and_asks_whether_the_device_is_in_use(monkeypatch):
    monkeypatch.setattr(provisioning, "_can_discard", lambda _: True)
    runner = _Runner()
    order = ProvisionOrder(id="0123456789abcdef", point="/run/nowhere/fs", size_bytes=1 << 30, options={})
    StorageMaker(runner, _Mounter(), "/dev/nowhere", order).discard()
    # Without --force blkdiscard opens a device exclusively.
    assert runner.ran == [("blkdiscard", "--offset", "0", "--length", str(1 << 30), "/dev/nowhere")]
