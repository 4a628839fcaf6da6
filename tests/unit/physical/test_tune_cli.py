"""The command line of a tuning: how its option is read, and what is refused before anything is touched."""

from __future__ import annotations

import click
import pytest

from snapmgr.cli.prepare import command
from snapmgr.cli.session import Session
from snapmgr.physical.prepare.places import memory_available
from snapmgr.physical.tuning.limits import limits


def parsed(*words):
    with command.make_context("prepare", list(words), obj=Session()) as ctx:
        return ctx.params


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        (["/jfs/full"], None),
        (["/jfs/full", "--tune"], 1800),
        (["--tune", "/jfs/full"], 1800),
        (["--tune", "10m", "/jfs/full"], 600),
        (["/jfs/full", "--tune=1h30m"], 5400),
        (["--tune", "--json", "/jfs/full"], 1800),
    ],
)
def test_time_may_be_left_out(words, seconds):
    params = parsed(*words)
    assert params["tune_s"] == seconds
    assert params["snapshot"] == "/jfs/full"


def test_time_must_be_one():
    with pytest.raises(click.BadParameter, match="not a duration"):
        parsed("/jfs/full", "--tune=soon")


def test_what_contradicts_a_tuning_is_refused(run, tmp_path):
    there = tmp_path / "report.html"
    there.write_text("mine")
    for words, says in [
        (("/jfs/full", "--report", "x.html"), "--report goes with --tune"),
        (("/jfs/full", "/srv/new", "--tune"), "it takes no DIR"),
        (("/jfs/full", "--tune", "--strategy", "scratch"), "is about --strategy storage"),
        (("/jfs/full", "--tune", "--result", "storage"), "keeps no result"),
        (("/jfs/full", "--tune", "--report", str(there)), "report.html exists"),
        ((str(tmp_path), "--tune"), "snapmgr: error"),
    ]:
        code, out, err = run("prepare", *words)
        assert (code != 0, out) == (True, "")
        assert says in err
    assert there.read_text() == "mine"


@pytest.mark.usefixtures("catalog")
def test_snapshot_that_no_tool_made_cannot_be_tuned(run):
    code, out, err = run("prepare", "latest", "--tune")
    assert (code, out) == (2, "")
    assert "is not a snapshot of a configured physical job" in err


def test_limits_are_of_this_machine(tmp_path):
    gib = 1 << 30
    found = limits(
        10 * gib, private=True, io_threads=False, cache_root=str(tmp_path), folders=["/nowhere", str(tmp_path)]
    )
    assert 256 << 20 <= found.memory_bytes <= max(memory_available(), 256 << 20)
    assert found.cache_bytes >= 128 << 20
    # The default folder's disk is no other one, and what is not there is none at all.
    assert found.cache_dirs == ()
    small = limits(1 << 20, private=False, io_threads=True, cache_root=str(tmp_path))
    assert small.memory_bytes == 256 << 20
    assert (small.cache_bytes, small.cache_dirs, small.io_threads) == (0, (), True)
