"""What becomes of an attachment when its context ends."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from snapmgr.access import attach
from snapmgr.cli.signals import Interrupted
from snapmgr.contract.errors import InUseError


@pytest.fixture
def outcomes(monkeypatch):
    """What each release does: raise it, or nothing for None."""
    left, seen = [], []

    def release(_ctx, lease):
        seen.append(lease)
        error = left.pop(0)
        if error is not None:
            raise error

    monkeypatch.setattr(attach, "attach", lambda *_args, **_options: "the lease")
    monkeypatch.setattr(attach, "auto_extended", lambda *_args: nullcontext())
    monkeypatch.setattr(attach, "release", release)
    return SimpleNamespace(left=left, seen=seen)


def run():
    with attach.attached(SimpleNamespace(tell=print), SimpleNamespace(manifest=None)):
        pass


def test_a_signal_that_meets_the_clearing_up_does_not_end_it(outcomes):
    outcomes.left += [Interrupted(15), None]
    with pytest.raises(Interrupted):
        run()
    assert outcomes.seen == ["the lease"] * 2


def test_an_error_is_told_and_not_tried_again(outcomes):
    outcomes.left += [InUseError("somebody is in it")]
    with pytest.raises(InUseError):
        run()
    assert outcomes.seen == ["the lease"]
