"""Runs the commands that change LVM: we never end them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from snapmgr.api import CommandError, StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.api import Runner


def change(runner: Runner, argv: Sequence[str], *, timeout_s: float = 60.0) -> None:
    """Run a command of LVM. Raises StorageError if it fails, or is not done after `timeout_s`: it is left running then.

    Killed half-way it might leave a device suspended.
    """
    try:
        runner.run(argv, timeout_s=timeout_s, abandon=True)
    except CommandError as error:
        raise StorageError(error.message, hint=error.hint) from error
