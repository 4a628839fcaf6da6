"""What makes file systems for the benchmark: the programs that it runs."""

from __future__ import annotations

from snapmgr.api import Completed, ProvisionOrder, StorageMaker
from snapmgr.system import provisioning


class _Runner:
    def __init__(self):
        self.ran = []

    def run(self, argv, *, ok=(0,), timeout_s=60.0):  # noqa: ARG002 - as it is called
        self.ran.append(tuple(argv))
        return Completed(argv=tuple(argv), returncode=0, stdout="", stderr="")


class _Mounter:
    def mounts(self):
        return ()


def _order(**further):
    return ProvisionOrder(id="0123456789abcdef", point="/run/nowhere/fs", size_bytes=1 << 30, options={}, **further)


def test_a_discard_ends_where_the_order_does_and_asks_whether_the_device_is_in_use(monkeypatch):
    monkeypatch.setattr(provisioning, "_can_discard", lambda _: True)
    runner = _Runner()
    StorageMaker(runner, _Mounter(), "/dev/nowhere", _order()).discard()
    # Without --force blkdiscard opens a device exclusively.
    assert runner.ran == [("blkdiscard", "--offset", "0", "--length", str(1 << 30), "/dev/nowhere")]


def test_flash_in_a_steady_state_is_not_discarded(monkeypatch):
    monkeypatch.setattr(provisioning, "_can_discard", lambda _: True)
    runner = _Runner()
    StorageMaker(runner, _Mounter(), "/dev/nowhere", _order(discard=False)).discard()
    assert runner.ran == []
