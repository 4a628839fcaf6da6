"""`bench advise`: what to use for a purpose, what to avoid and why, how sure, with which guarantees."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from snapmgr.bench.statistics.uses import USES as KNOWN
from snapmgr.cli.benchadvise import USES
from snapmgr.cli.main import main
from support.bench.documents import bench_run
from support.bench.samples import HOST, blogs, random_updates

WHOLE = {"atomicity": "volume", "clone": "native", "survives_origin": True}
FILES = {"atomicity": "file", "clone": "native", "survives_origin": True}


@pytest.fixture
def advise(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Return a function that writes samples and advises on them."""

    def ask(samples, *arguments):
        folder = tmp_path / "results"
        folder.mkdir(exist_ok=True)
        (folder / "run.json").write_text(json.dumps({"schema": 1, **bench_run(arguments={})}))
        for one in samples:
            promise = {"btrfs": WHOLE, "xfs-reflink": FILES}.get(one["stack"])
            (folder / f"{one['id']}.json").write_text(json.dumps({**one, "guarantee": promise}))
        code = main(["bench", "advise", *map(str, arguments), str(folder)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return ask


def updates(**times):
    """Return random updates of storages whose passes take so many times as long as they are made up with."""
    found = []
    for one in random_updates(blocks=10, noise=0.03):
        if one["stack"] in {"btrfs", "xfs-reflink", "ext4", "lvm-thin+xfs"}:
            metrics = {**one["metrics"]}
            metrics["update_first_s"] *= times.get(one["stack"].replace("-", "_").replace("+", "_"), 1)
            found.append({**one, "metrics": metrics})
    return found


def test_the_names_for_click_are_those_of_the_uses():
    assert set(USES) == set(KNOWN)


def test_a_database_gets_a_storage_with_its_guarantee_and_what_to_avoid(advise):
    code, out, _ = advise([one for one in updates() if one["stack"] != "lvm-thin+xfs"], "--for", "oltp")
    assert code == 0
    lines = out.splitlines()
    assert lines[2] == "A DATABASE WITH SNAPSHOTS"
    assert lines[3] == "For a database with snapshots: xfs-reflink."
    told = {part.splitlines()[0]: part for part in out.split("\n\n")}
    promise = told["What its snapshots promise:"]
    assert "atomic for each file only; a running server needs its process frozen" in promise
    assert "Without freezing the server, the first in this order: btrfs." in promise
    assert "btrfs: Random update" in told["What to avoid, and why:"]
    assert "How sure this is:" in told
    assert "Blogs" not in out


def test_only_the_scenarios_of_a_use_count(advise):
    both = [*updates(btrfs=9), *blogs(pairs=8)]
    code, out, _ = advise(both, "--for", "files", "--json")
    found = json.loads(out)
    assert (code, found["use"], found["scenarios"], found["chosen"]) == (0, "files", ["blog"], "btrfs")
    assert "Random update" not in json.dumps(found["sentences"])
    assert {one["stack"] for one in found["storages"]} >= {"btrfs", "lvm+ext4"}


def test_storages_without_snapshots_have_an_order_of_their_own(advise):
    renamed = {"btrfs": "xfs", "lvm-thin+xfs": "ext4-dioread-lock", "xfs-reflink": "btrfs"}
    made = [{**one, "stack": renamed.get(one["stack"], one["stack"])} for one in updates()]
    code, out, _ = advise(made, "--for", "oltp", "--json")
    without = json.loads(out)["without"]
    assert code == 0
    assert (without["title"], without["chosen"], without["sure"]) == ("a database without snapshots", "ext4", "shown")
    assert without["order"][0] == ["ext4"]
    assert {stack for place in without["order"] for stack in place} == {"ext4", "xfs", "ext4-dioread-lock"}
    # The storage with snapshots stands in neither reason.
    assert "btrfs" not in json.dumps([one for one in without["sentences"] if one["kind"] in {"lead", "because"}])
    text = advise(made, "--for", "oltp")[1]
    assert "A DATABASE WITHOUT SNAPSHOTS\nFor a database without snapshots: ext4." in text


def test_a_loop_device_gives_an_indicative_order_and_nothing_is_chosen(advise):
    loop = {**HOST, "device": {"kind": "loop", "name": "loop0", "loop": {"on": [HOST["device"]]}}}
    code, out, _ = advise([{**one, "host": loop} for one in updates()], "--for", "oltp", "--json")
    found = json.loads(out)
    assert (code, found["chosen"], found["sure"]) == (0, None, "indicative")
    assert found["order"][0] == ["xfs-reflink"]


def test_results_of_another_use_are_an_error_that_says_what_to_measure(advise):
    code, out, err = advise(blogs(), "--for", "staging")
    assert (code, out) == (1, "")
    assert "these results say nothing about preparing physical backups" in err
    assert "hint: measure for it: snapmgr bench run prepare" in err


def test_without_a_use_the_error_names_them(advise):
    code, out, err = advise(updates(), "--json")
    assert code == 2
    assert "--for oltp, --for staging, --for files" in out + err


def test_a_file_that_cannot_be_read_is_named_after_the_advice(advise, tmp_path):
    advise(updates(), "--for", "oltp")
    (tmp_path / "results" / "0001-bad.json").write_text("{")
    code, out, err = advise([], "--for", "oltp")
    assert code == 1
    assert "For a database with snapshots" in out
    assert "0001-bad.json is damaged" in err
