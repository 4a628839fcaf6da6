"""Brings flash to a steady state before it is measured: new or discarded flash writes faster than used flash.

This follows the Solid State Storage Performance Test Specification of SNIA: the device is written in full twice, then
at random, round after round, until the last rounds neither scatter nor rise nor fall. A discard would undo this, so the
run discards nothing afterwards.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, mean
from typing import TYPE_CHECKING

from snapmgr.bench.fio import run_fio
from snapmgr.contract.units import format_duration, format_size
from snapmgr.system.command import dying_with_us

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from snapmgr.bench.device.target import OpenTarget
    from snapmgr.bench.fio import Section
    from snapmgr.contract.backend import Runner

TIMES = 2
"""Number of sequential writes of the whole device."""
WINDOW = 5
"""Number of rounds in the window."""
SCATTER = 0.20
"""Maximum distance between a window's fastest and slowest round, as a share of its mean."""
SLOPE = 0.10
"""Maximum rise or fall of the line fitted to a window, as a share of its mean."""
ROUND_S = 60.0
"""Length of a round; shorter if `ROUNDS` would not fit into the available time."""
ROUNDS = 25
"""Maximum number of rounds."""
# The same as random-update writes.
_UNIT = "16k"
_BLOCK = 128 << 10
_PROBE_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Conditioning:
    """The result."""

    steady: bool
    why: str
    """The reason in words."""
    seconds: float
    written_bytes: int
    """Bytes written sequentially."""
    rounds: tuple[float, ...]
    """Writes per second in each round."""


def is_steady(rounds: Sequence[float]) -> bool:
    """Return whether the last `WINDOW` rounds (writes per second) keep within `SCATTER` and `SLOPE`."""
    last = rounds[-WINDOW:]
    if len(last) < WINDOW or min(last) <= 0:
        return False
    slope = linear_regression(range(WINDOW), last).slope
    return max(last) - min(last) <= SCATTER * mean(last) and abs(slope) * (WINDOW - 1) <= SLOPE * mean(last)


def make_steady(
    target: OpenTarget,
    *,
    within_s: float,
    folder: Path,
    runner: Runner,
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> Conditioning:
    """Write to all of a blank target until it is steady, or for `within_s` at most; its content is lost.

    fio's files go to `folder`. A device that is too large or too slow to be written twice in that time is not steady,
    and the reason says so. Raises what `OpenTarget.check` and `run_fio` raise.
    """
    begun, rounds, path = clock(), list[float](), Path(target.device)
    size = format_size(target.size_bytes)
    round_s = min(ROUND_S, within_s / ROUNDS)

    def left_s() -> float:
        return within_s - (clock() - begun)

    def written(name: str, job: Section) -> tuple[float, int]:
        """Write and return the rate (1/s) and the bytes."""
        # The lock is advisory: if another program has taken the device, its data must survive.
        target.check()
        common: Section = {"filename": path.name, "size": target.size_bytes, "direct": 1}
        # fio itself dies with us, its jobs only as threads.
        common |= {"ioengine": "libaio", "iodepth": 32, "thread": None}
        run = run_fio(
            name,
            {"global": common, "job": job},
            directory=path.parent,
            keep=folder,
            runner=runner,
            prefix=dying_with_us(),
        )
        return run.iops("write"), run.moved_bytes("write")

    def in_order(name: str, seconds: float) -> tuple[float, int]:
        """Write from the beginning on; return the rate (B/s) and the bytes."""
        rate, moved = written(name, {"rw": "write", "bs": _BLOCK, "loops": TIMES, "runtime": _whole(seconds)})
        return rate * _BLOCK, moved

    def ended(why: str) -> Conditioning:
        steady = is_steady(rounds)
        tell(f"{target.device} {'is' if steady else 'is not'} in a steady state: {why}")
        return Conditioning(steady=steady, why=why, seconds=clock() - begun, written_bytes=moved, rounds=tuple(rounds))

    whole = TIMES * target.size_bytes
    rate, moved = in_order("probe", _PROBE_S)
    if whole > rate * within_s:
        # The gain is not worth the wear.
        return ended(
            f"at {format_size(int(rate))} a second, {TIMES} × {size} are too much for {format_duration(within_s)}"
        )
    tell(f"writing the {size} of {target.device} {TIMES} times (at most {format_duration(within_s)})")
    _, moved = in_order("in-order", left_s())
    # A last piece smaller than a block is left out.
    if moved < whole - TIMES * _BLOCK:
        return ended(f"{format_size(moved)} of {TIMES} × {size} were written in {format_duration(within_s)}")
    while left_s() >= round_s and len(rounds) < ROUNDS:
        job = {"rw": "randwrite", "bs": _UNIT, "norandommap": None, "time_based": None, "runtime": _whole(round_s)}
        rate, _ = written(f"round-{len(rounds) + 1}", {**job, "randseed": len(rounds) + 1})
        rounds.append(rate)
        tell(f"round {len(rounds)}: {rate:.0f} random writes of {_UNIT} a second")
        if is_steady(rounds):
            return ended(f"{WINDOW} rounds within {SCATTER:.0%}, after {len(rounds)}")
    return ended(f"the time was over after {len(rounds)} rounds of {format_duration(round_s)}, which were not alike")


def _whole(seconds: float) -> int:
    """Return whole seconds for fio, which treats 0 as no limit."""
    return max(int(seconds), 1)
