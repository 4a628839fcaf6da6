"""The search for settings, on simulated storages whose best settings are known."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from snapmgr.physical.tuning.ladder import Stop, Try, moves, next_rung, noise, standing
from snapmgr.physical.tuning.rungs import Run, RungSettings, changes
from support.simulated import GIB, LIMITS, MIB, SimulatedStorage


def climb(storage, limits=LIMITS, *, spread=0.0, seed=0, time_s=math.inf, start=None):
    """Search as `--tune` does; return the history and the end."""
    dice = random.Random(seed)
    history: list[Run] = []
    left_s = time_s
    while True:
        step = next_rung(history, limits, left_s=left_s, start=start)
        if isinstance(step, Stop):
            return history, step
        took = storage.seconds(step.settings) * math.exp(dice.gauss(0, spread))
        cut = took > step.limit_s
        seconds = step.limit_s if cut else took
        assert seconds <= left_s
        left_s -= seconds
        bottleneck = storage.bottleneck(step.settings)
        history.append(Run(settings=step.settings, seconds=seconds, cut=cut, bottleneck=bottleneck))
        assert len(history) < 200


CELLS = tuple(
    RungSettings(
        use_memory_bytes=memory,
        flush_method=method or ("fsync" if joined else None),
        writeback=delay_s is not None,
        upload_delay_s=delay_s or 0.0,
        cache_bytes=cache,
        cache_dir=folder,
        warm_up=warm_up,
        max_uploads=uploads,
        kernel_writeback=joined,
    )
    for memory, method, delay_s, cache, folder, warm_up, uploads, joined in itertools.product(
        (None, LIMITS.memory_bytes),
        (None, "fsync"),
        (None, 0.0, 3600.0),
        (None, int(LIMITS.data_bytes * 1.25)),
        (None, "/fast"),
        (False, True),
        (None, 150),
        (False, True),
    )
)


def best_of_all(storage):
    """Try every combination, as no search could."""
    return min(map(storage.seconds, CELLS))


storages = st.builds(
    SimulatedStorage,
    pages=st.integers(0, 100_000),
    get_s=st.floats(0, 0.1),
    put_s=st.floats(0, 0.1),
    bandwidth=st.floats(1e7, 1e10),
    touched_bytes=st.integers(50 * MIB, 8 * GIB),
    fsync_s=st.floats(0, 1),
    cache_page_s=st.floats(0, 0.005),
    fast_cache_page_s=st.floats(0, 0.005),
    upload_page_s=st.floats(0, 0.002),
    default_cache_bytes=st.integers(50 * MIB, 4 * GIB),
    tool_s=st.floats(0.5, 20),
)


@settings(max_examples=50)
@given(storages)
def test_search_finds_the_best_settings(storage):
    history, end = climb(storage)
    assert end.exhausted
    # Each setting may be worth what the floor of the noise hides.
    assert storage.seconds(end.settings) <= best_of_all(storage) * 1.25
    assert end.settings in {run.settings for run in history}


@settings(max_examples=30)
@given(storages, st.floats(0, 0.3), st.integers(0, 1000))
def test_no_single_change_gains_more_than_the_noise_hides(storage, spread, seed):
    history, end = climb(storage, spread=spread, seed=seed)
    measured = {run.settings for run in history}
    found = standing(history, LIMITS)
    assert end.settings == found.best
    assert found.unsure is None
    # Whatever differs by one setting was tried, if not from here then from a rung before.
    tried = {move.key for step in found.steps for move in moves(step, LIMITS) if move.settings in measured}
    assert {move.key for move in moves(end.settings, LIMITS)} <= tried


@settings(max_examples=30)
@given(storages, st.floats(0, 0.5), st.integers(0, 1000))
def test_a_noisy_storage_does_not_fool_the_search(storage, spread, seed):
    _, end = climb(storage, spread=spread, seed=seed)
    # Several steps, each of which chance may have favoured by some spreads, and never a rung far worse than the first.
    assert storage.seconds(end.settings) <= storage.seconds(RungSettings()) * math.exp(4 * spread)


@settings(max_examples=30)
@given(storages, st.floats(1, 2000), st.floats(0, 0.3), st.integers(0, 1000))
def test_time_is_kept(storage, time_s, spread, seed):
    history, end = climb(storage, time_s=time_s, spread=spread, seed=seed)
    assert sum(run.seconds for run in history) <= time_s * (1 + 1e-9)
    assert end.settings in {run.settings for run in history}


@settings(max_examples=30)
@given(storages, st.integers(0, 1000))
def test_no_rung_runs_more_than_three_times(storage, seed):
    history, _ = climb(storage, spread=0.2, seed=seed)
    rungs = [run.settings for run in history]
    assert max(map(rungs.count, rungs)) <= 3


def test_storage_of_the_measured_kind_gets_three_times_faster():
    storage = SimulatedStorage()
    history, end = climb(storage, spread=0.1, seed=3, time_s=1800)
    assert end.settings.writeback
    assert storage.seconds(end.settings) * 3 <= storage.seconds(RungSettings())
    # What published ladders end with comes first, at once.
    assert changes(history[0].settings, history[1].settings) == "+ use-memory 4.0 GiB, + writeback, + upload delay 1 h"


def test_what_ends_beats_a_first_rung_that_did_not_in_the_time():
    first = Run(settings=RungSettings(), seconds=300, cut=True, bottleneck="unknown")
    second = Run(settings=RungSettings(writeback=True), seconds=212, cut=False, bottleneck="upload")
    step = next_rung([first, second], LIMITS, left_s=50)
    assert isinstance(step, Stop)
    assert step.settings == second.settings


def test_large_cache_counts_only_with_what_fills_it():
    storage = SimulatedStorage(pages=0, tool_s=1, fsync_s=0, get_s=0.05, touched_bytes=MIB)
    _, end = climb(storage)
    assert end.settings.warm_up
    assert end.settings.cache_bytes == int(2 * GIB * 1.25)


@pytest.mark.parametrize(
    ("limits", "allowed"),
    [
        (replace(LIMITS, private=False), {"use_memory_bytes", "flush_method"}),
        (replace(LIMITS, private=False, io_threads=True), {"use_memory_bytes", "flush_method", "io_threads"}),
        (replace(LIMITS, cache_dirs=()), None),
    ],
)
def test_only_what_may_be_tried_is_tried(limits, allowed):
    history, _ = climb(SimulatedStorage(), limits)
    changed = {
        name
        for run in history
        for name in RungSettings.__struct_fields__
        if getattr(run.settings, name) != getattr(RungSettings(), name)
    }
    assert changed == allowed if allowed is not None else "cache_dir" not in changed
    assert all((run.settings.use_memory_bytes or 0) <= limits.memory_bytes for run in history)
    assert all((run.settings.cache_bytes or 0) <= limits.cache_bytes for run in history)


def test_cut_first_rung_is_a_bound_to_compare_with():
    storage = SimulatedStorage(put_s=1.0)
    history, end = climb(storage, time_s=600)
    assert history[0].cut
    assert history[0].seconds == 300
    assert storage.seconds(end.settings) < 300


def test_users_own_options_stay():
    start = RungSettings(extra_mount=("--max-downloads", "50"), extra_tool=("--innodb-io-capacity=9",))
    history, _ = climb(SimulatedStorage(), start=start)
    assert history[0].settings == start
    assert {run.settings.extra_mount for run in history} == {start.extra_mount}
    assert {run.settings.extra_tool for run in history} == {start.extra_tool}


def test_noise_is_the_spread_of_repeats():
    fast, slow = RungSettings(writeback=True), RungSettings()
    runs = [Run(settings=slow, seconds=100), Run(settings=fast, seconds=30)]
    assert noise(runs) is None
    assert noise([*runs, Run(settings=fast, seconds=30, cut=True)]) is None
    # One standard deviation of two values that differ by 20 %.
    assert noise([*runs, Run(settings=fast, seconds=36)]) == pytest.approx(math.log(1.2) / math.sqrt(2))
    assert noise([*runs, Run(settings=fast, seconds=30)]) == pytest.approx(0.03)


def test_small_gain_is_repeated_before_it_counts():
    limits = replace(LIMITS, private=False)
    faster = RungSettings(use_memory_bytes=limits.memory_bytes)
    runs = [Run(settings=RungSettings(), seconds=100), Run(settings=faster, seconds=90)]
    step = next_rung(runs, limits, left_s=9000)
    assert isinstance(step, Try)
    assert (step.settings, step.repeat) == (faster, True)
    # The repeat was slower than the default: what looked like a gain was noise.
    runs.append(Run(settings=faster, seconds=115))
    assert standing(runs, limits).best == RungSettings()
    assert next_rung(runs, limits, left_s=49) == Stop(settings=RungSettings(), why="the time is up", exhausted=False)


def test_changes_in_words():
    default = RungSettings()
    tuned = RungSettings(writeback=True, use_memory_bytes=800 * MIB)
    assert changes(default, tuned) == "+ use-memory 800.0 MiB, + writeback"
    assert changes(tuned, replace(tuned, use_memory_bytes=GIB)) == "+ use-memory 1.0 GiB"
    assert changes(tuned, replace(tuned, writeback=False)) == "− writeback"
    assert changes(tuned, tuned) == "once more"
    assert str(default) == "default"
