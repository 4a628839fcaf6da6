"""Searches for the fastest settings of a prepare (pure): given the measured runs, returns the next rung or stops.

The search climbs from the best rung so far, one setting at a time; the bottleneck decides which setting comes first.
A rung counts as better only if it gains more than the noise, which is the spread of repeats: while the noise is
unknown and the gain is small, the search repeats a rung. It tries a setting that gained nothing again only when the
bottleneck has changed, when everything is much faster now, or when a related setting has changed since.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING, Literal

from msgspec import Struct
from msgspec.structs import replace

from snapmgr.physical.tuning.rungs import (
    DEFAULT_MEMORY_BYTES,
    DEFAULT_UPLOADS,
    Dimension,
    Run,
    RungSettings,
    TuningLimits,
    with_room,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Most runs of one rung: a gain that three runs do not show is not worth having.
_MOST_RUNS = 3
# Two machines' repeats differed by 5 to 55 %: a rung twice as fast is better whatever the noise.
_CLEAR_GAIN = math.log(2)
# Lower bound of the noise, for repeats that agree by chance.
_LEAST_NOISE = 0.03
# Beyond this a rung is clearly slower than the best one, and the search ends it.
_LIMIT = 1.25
_MUCH_FASTER = 0.7
# Share of the time for the first rung: a slower one leaves no time for others.
_FIRST_SHARE = 0.5
_DELAY_S = 3600.0
_UPLOADS = (50, 150)
_IO_THREADS = (16, 64)
_MEMORY_STEP = 8
# A cache for all data and for the pages that the prepare writes.
_CACHE_PER_DATA = 1.25
_MIB = 1 << 20

# Which settings to try first, by bottleneck; see docs/how-to/tune-prepare.md. The others follow in `_ORDER`.
_ORDER: tuple[Dimension, ...] = (
    "writeback",
    "use-memory",
    "flush-method",
    "upload-delay",
    "warm-up",
    "cache-size",
    "cache-folder",
    "max-uploads",
    "kernel-writeback",
    "io-threads",
)
_FIRST: dict[str, tuple[Dimension, ...]] = {
    "fsync": ("use-memory", "writeback", "upload-delay"),
    "upload": ("writeback", "upload-delay", "flush-method", "max-uploads"),
    "write": ("writeback", "upload-delay", "flush-method", "max-uploads"),
    "download": ("cache-size", "warm-up", "cache-folder"),
    "read": ("warm-up", "cache-size", "io-threads"),
    "cpu": ("use-memory", "upload-delay", "kernel-writeback"),
    "compaction": ("use-memory", "upload-delay", "kernel-writeback"),
    "program": ("use-memory", "io-threads", "cache-folder"),
}
# Related settings: when one changes, the earlier results of the others may no longer hold.
_TOGETHER: tuple[frozenset[Dimension], ...] = (
    frozenset({"writeback", "upload-delay", "max-uploads", "flush-method"}),
    frozenset({"writeback", "cache-size", "cache-folder", "upload-delay"}),
    frozenset({"cache-size", "cache-folder", "warm-up"}),
    frozenset({"flush-method", "kernel-writeback", "use-memory"}),
    frozenset({"writeback", "use-memory", "warm-up"}),
)


class Move(Struct, frozen=True, kw_only=True):
    """One setting changed."""

    dimension: Dimension
    key: str
    """The change itself, whatever it starts from: "cache-folder /fast"."""
    settings: RungSettings
    joined: bool = False
    """Several settings together, each of which may do harm alone: tried when no single one helps any more."""


class Try(Struct, frozen=True, kw_only=True):
    """The rung to run next."""

    settings: RungSettings
    limit_s: float
    """Time after which the rung has lost and is ended."""
    why: str
    repeat: bool = False
    warm: bool = False
    """Whether it starts from the cache that an earlier run left."""
    check: bool = False
    """Whether the tables' checksums are taken."""


class Stop(Struct, frozen=True, kw_only=True):
    """There is nothing more to try, or no time for it."""

    settings: RungSettings
    why: str
    exhausted: bool
    """Whether everything allowed was tried; otherwise the time was up."""


class Standing(Struct, frozen=True, kw_only=True):
    """The result of the runs so far."""

    best: RungSettings
    best_s: float
    bottleneck: str
    noise: float | None
    """Spread of a rung's repeats, as a share of its time; None before the first repeat."""
    steps: tuple[RungSettings, ...]
    """The rungs that were the best when they were tried, in order; the last one is `best`."""
    unsure: RungSettings | None
    """The rung to repeat before the last comparison can be decided: the rung tried last, or the one it is compared
    with."""


def moves(settings: RungSettings, limits: TuningLimits) -> tuple[Move, ...]:
    """Return every rung that differs from `settings` by one setting, or by some that belong together."""
    found = list(_tool_moves(settings, limits))
    if limits.private:
        found += [*_cache_moves(settings, limits), *_upload_moves(settings), *_joined_moves(settings, limits)]
    return tuple(move for move in found if move.settings != settings)


def _move(dimension: Dimension, what: object, settings: RungSettings) -> Move:
    return Move(dimension=dimension, key=f"{dimension} {what}", settings=settings)


def _tool_moves(settings: RungSettings, limits: TuningLimits) -> Iterator[Move]:
    memory = settings.use_memory_bytes or DEFAULT_MEMORY_BYTES
    if memory < limits.memory_bytes:
        yield _move("use-memory", "most", replace(settings, use_memory_bytes=limits.memory_bytes))
    if memory * _MEMORY_STEP < limits.memory_bytes:
        yield _move("use-memory", "more", replace(settings, use_memory_bytes=memory * _MEMORY_STEP))
    if settings.flush_method is None:
        yield _move("flush-method", "fsync", replace(settings, flush_method="fsync"))
    for threads in _IO_THREADS if limits.io_threads else ():
        if threads > (settings.io_threads or 0):
            yield _move("io-threads", threads, replace(settings, io_threads=threads))


def _cache_moves(settings: RungSettings, limits: TuningLimits) -> Iterator[Move]:
    room = math.ceil(limits.data_bytes * _CACHE_PER_DATA / _MIB) * _MIB
    yield _move("cache-size", "all", with_room(settings, room, limits))
    for folder in limits.cache_dirs:
        yield _move("cache-folder", folder, replace(settings, cache_dir=folder))
    # Reading data that is evicted before its use is wasted.
    yield _move("warm-up", "on", with_room(replace(settings, warm_up=True), room, limits))


def _upload_moves(settings: RungSettings) -> Iterator[Move]:
    yield _move("writeback", "on", replace(settings, writeback=True))
    if settings.writeback:
        yield _move("upload-delay", "long", replace(settings, upload_delay_s=_DELAY_S))
    for uploads in _UPLOADS:
        if uploads > (settings.max_uploads or DEFAULT_UPLOADS):
            yield _move("max-uploads", uploads, replace(settings, max_uploads=uploads))
    # O_DIRECT, the tools' default, bypasses it.
    method = settings.flush_method or "fsync"
    yield _move("kernel-writeback", "on", replace(settings, kernel_writeback=True, flush_method=method))


def _joined_moves(settings: RungSettings, limits: TuningLimits) -> Iterator[Move]:
    """Yield combined moves: writeback into a slow cache loses, and so does a fast cache alone; together they may win.

    The alternative to writeback may also turn out better: many parallel uploads, each of joined writes.
    """
    joined: dict[str, RungSettings] = {}
    if settings.writeback:
        memory = max(limits.memory_bytes, settings.use_memory_bytes or 0)
        plain = replace(
            settings, writeback=False, upload_delay_s=0.0, max_uploads=_UPLOADS[-1], use_memory_bytes=memory
        )
        joined["uploads instead"] = plain
        joined["joined uploads instead"] = replace(plain, kernel_writeback=True, flush_method="fsync")
    else:
        for folder in (settings.cache_dir, *limits.cache_dirs):
            for delay_s in (0.0, _DELAY_S):
                if delay_s or folder != settings.cache_dir:
                    new = replace(settings, writeback=True, cache_dir=folder, upload_delay_s=delay_s)
                    joined[f"on in {folder} after {delay_s:.0f} s"] = new
    for what, new in joined.items():
        yield Move(dimension="writeback", key=f"writeback {what}", settings=new, joined=True)
    if settings.warm_up:
        yield Move(dimension="warm-up", key="warm-up off", settings=replace(settings, warm_up=False), joined=True)


def _leap(settings: RungSettings, limits: TuningLimits) -> RungSettings:
    """Return the settings that published ladders end with: each alone may gain little, and every rung is expensive."""
    if not limits.private:
        return settings
    memory = max(limits.memory_bytes, settings.use_memory_bytes or 0)
    return replace(settings, use_memory_bytes=memory, writeback=True, upload_delay_s=_DELAY_S)


def noise(history: Sequence[Run]) -> float | None:
    """Return the spread of repeats as a share: the standard deviation within rungs, all repeated ones together."""
    squares, freedom = 0.0, 0
    for runs in _by_settings(history).values():
        times = [math.log(run.seconds) for run in runs if not run.cut]
        if len(times) > 1:
            mean = sum(times) / len(times)
            squares += sum((time - mean) ** 2 for time in times)
            freedom += len(times) - 1
    return max(_LEAST_NOISE, math.sqrt(squares / freedom)) if freedom else None


def standing(history: Sequence[Run], limits: TuningLimits) -> Standing:
    """Given at least one run, return which rung is the best so far and how sure that is."""
    return _replay(history, limits).standing


def next_rung(
    history: Sequence[Run], limits: TuningLimits, *, left_s: float, start: RungSettings | None = None
) -> Try | Stop:
    """Given all runs so far, return the rung to run next, or that the search is over.

    Args:
        history: in the order in which they ran.
        limits: of the settings.
        left_s: time left for all further runs, in seconds.
        start: the rung to begin with; by default the defaults.
    """
    if not history:
        return Try(
            settings=start or RungSettings(), limit_s=left_s * _FIRST_SHARE, why="what all others are compared with"
        )
    replayed = _replay(history, limits)
    now = replayed.standing
    # A rung that takes at most half of the best time is certainly better; judging others would take too long.
    if left_s < now.best_s / 2:
        return Stop(settings=now.best, why="the time is up", exhausted=False)
    limit_s = min(now.best_s * _LIMIT, left_s)
    if now.unsure is not None:
        # A repeat that does not end says nothing about the spread.
        return Try(settings=now.unsure, limit_s=left_s, why="is the gain more than the noise?", repeat=True)
    leap = _leap(now.best, limits)
    if len({run.settings for run in history}) == 1 and leap != now.best:
        return Try(
            settings=leap,
            limit_s=limit_s,
            why="all settings that usually help, together: the climb continues from there",
        )
    choice = _choose(replayed, history, limits)
    if choice is None:
        return Stop(settings=now.best, why="nothing that is left gains more than the noise", exhausted=True)
    return Try(settings=choice.settings, limit_s=limit_s, why=_reason(now.bottleneck, choice.dimension))


class _Refusal(Struct, frozen=True, kw_only=True):
    """A move that gained nothing, and the state at that time."""

    dimension: Dimension
    bottleneck: str
    accepted: int
    """How many moves had been accepted by then."""
    best_s: float


class _Replay(Struct, frozen=True, kw_only=True):
    standing: Standing
    accepted: tuple[Dimension, ...]
    refused: dict[str, _Refusal]


def _replay(history: Sequence[Run], limits: TuningLimits) -> _Replay:
    """Climb again with all runs so far: a repeat may change the meaning of an earlier run."""
    rungs = _by_settings(history)
    spread = noise(history)
    order = list(rungs)
    best, steps = order[0], [order[0]]
    accepted: list[Dimension] = []
    refused: dict[str, _Refusal] = {}
    unsure: RungSettings | None = None
    for candidate in order[1:]:
        move = next((move for move in moves(best, limits) if move.settings == candidate), None)
        judged = _judge(rungs[candidate], rungs[best], spread)
        if judged == "better":
            best = candidate
            steps.append(candidate)
            accepted += [move.dimension] if move is not None else []
            continue
        if judged == "unsure" and candidate is order[-1]:
            unsure = _to_repeat(rungs, candidate, best)
        if move is not None:
            refused[move.key] = _Refusal(
                dimension=move.dimension,
                bottleneck=_bottleneck(rungs[best]),
                accepted=len(accepted),
                best_s=_typical(rungs[best]),
            )
    now = Standing(
        best=best,
        best_s=_typical(rungs[best]),
        bottleneck=_bottleneck(rungs[best]),
        noise=spread,
        steps=tuple(steps),
        unsure=unsure,
    )
    return _Replay(standing=now, accepted=tuple(accepted), refused=refused)


def _judge(new: Sequence[Run], old: Sequence[Run], spread: float | None) -> Literal["better", "worse", "unsure"]:
    whole = [run for run in new if not run.cut]
    gain = math.log(_typical(old) / _typical(new)) if whole else 0.0
    # A run that was ended took even longer, and is not repeated.
    if gain <= 0 or gain >= _CLEAR_GAIN or old[0].cut:
        return "better" if gain > 0 else "worse"
    if spread is None:
        return "unsure"
    if gain > 2 * spread * math.sqrt(1 / len(whole) + 1 / len(old)):
        return "better"
    can_repeat = len(whole) < _MOST_RUNS or (len(old) < _MOST_RUNS and not old[0].cut)
    # With the most runs of each the threshold comes down to this.
    return "unsure" if can_repeat and gain > 2 * spread * math.sqrt(2 / _MOST_RUNS) else "worse"


def _to_repeat(rungs: dict[RungSettings, list[Run]], candidate: RungSettings, best: RungSettings) -> RungSettings:
    """Return which of the two to repeat: the one with fewer runs, or else the faster one."""
    fewer = len(rungs[best]) < len(rungs[candidate]) and not rungs[best][0].cut
    return best if fewer else candidate


def _choose(replayed: _Replay, history: Sequence[Run], limits: TuningLimits) -> Move | None:
    now = replayed.standing
    tried = {run.settings for run in history}
    first = _FIRST.get(now.bottleneck, ())
    rank = {dimension: place for place, dimension in enumerate(dict.fromkeys((*first, *_ORDER)))}
    open_moves = [move for move in moves(now.best, limits) if move.settings not in tried]
    ranked = sorted(open_moves, key=lambda move: (move.joined, rank[move.dimension]))
    fresh = [move for move in ranked if move.key not in replayed.refused]
    again = [move for move in ranked if move.key in replayed.refused and _reopened(replayed, move)]
    single = [move for move in (*fresh, *again) if not move.joined]
    return next(iter([*single, *fresh, *again]), None)


def _reopened(replayed: _Replay, move: Move) -> bool:
    refusal = replayed.refused[move.key]
    since = set(replayed.accepted[refusal.accepted :])
    related = set[Dimension]().union(*(group for group in _TOGETHER if move.dimension in group))
    now = replayed.standing
    # A gain that was small beside a long time may be large beside a short one.
    other = refusal.bottleneck != now.bottleneck or now.best_s < _MUCH_FASTER * refusal.best_s
    return bool(since & related) or (bool(since) and other)


def _by_settings(history: Sequence[Run]) -> dict[RungSettings, list[Run]]:
    rungs: dict[RungSettings, list[Run]] = defaultdict(list)
    for run in history:
        rungs[run.settings].append(run)
    return dict(rungs)


def _typical(runs: Sequence[Run]) -> float:
    """Return the geometric mean of the completed runs; without any, the least time that one would have taken."""
    whole = [run.seconds for run in runs if not run.cut]
    if not whole:
        return max(run.seconds for run in runs)
    return math.exp(sum(math.log(seconds) for seconds in whole) / len(whole))


def _bottleneck(runs: Sequence[Run]) -> str:
    return next((run.bottleneck for run in reversed(runs) if run.bottleneck != "unknown"), "unknown")


def _reason(bottleneck: str, dimension: Dimension) -> str:
    if dimension in _FIRST.get(bottleneck, ()):
        return f"the bottleneck of the best rung is {bottleneck}: {dimension} may help"
    return f"all remedies for its bottleneck were tried: {dimension} is left"
