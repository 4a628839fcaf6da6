"""Results that are damaged or odd: whatever a value has become, `bench show` and `bench compare` know what to say."""

from __future__ import annotations

import copy
import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.published import unpacked
from snapmgr.cli.main import main
from support.bench.documents import bench_run
from support.bench.samples import blogs, random_updates

ARCHIVE = Path(__file__).parents[3] / "golden" / "bench" / "published.tar.xz"
BROKEN = ("run.json", "0001-real.json", "0002-drawn.json", "0003-timed.json")
"""Files of which one has a wrong value in each case; all others stay as they are."""
GONE = object()


def documents():
    """Return the files of a folder: a real sample, made-up ones with curves and timelines, and enough for ratios."""
    real = next(one for one in unpacked(ARCHIVE) if one["kind"] == "measured" and one["layouts"])
    drawn = [one for one in random_updates(blocks=7) if one["stack"] in {"btrfs", "ext4"}]
    for one in (real, *drawn):
        one["layouts"] = {name: {**each, "points": each["points"][:3]} for name, each in one["layouts"].items()}
        one["variant"] = "repaired"
    place = next(place for place, one in enumerate(drawn) if one["stack"] == "btrfs" and one["kind"] == "measured")
    return {
        "run.json": {"schema": 1, **bench_run(arguments={"stacks": ["ext4", "btrfs"]})},
        "0001-real.json": {**real, "run": "run-1", "block": 8},
        "0002-drawn.json": drawn.pop(place),
        **{f"{number:04d}-timed.json": one for number, one in enumerate(blogs(pairs=1), start=3)},
        **{f"{number:04d}-more.json": one for number, one in enumerate(drawn, start=10)},
    }


MADE = documents()


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder of sound results, and another one like it in which one file is changed at a time."""
    sound, damaged = tmp_path_factory.mktemp("sound"), tmp_path_factory.mktemp("damaged")
    for folder in (sound, damaged):
        for name, document in MADE.items():
            (folder / name).write_text(json.dumps(document))
    return sound, damaged


def commands(sound, damaged):
    yield "show", damaged
    yield "show", damaged, "--all", "-o", damaged / "report.html"
    yield "show", damaged, "-o", damaged / "samples.csv"
    yield "show", damaged, "--json"
    yield "advise", "--for", "oltp", damaged
    yield "compare", sound, damaged
    yield "compare", damaged, sound, "--json"
    yield "compare", "published", damaged


def said_by(*words):
    """Run a command and return its exit code and what it said; what it does not know to say is a failure."""
    # Not by a fixture: these are reset for each test, not for each case.
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = main(["bench", *map(str, words)])
    assert "bug in snapmgr" not in out.getvalue() + err.getvalue(), (words, err.getvalue())
    if "--json" in words:
        json.loads(out.getvalue(), parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    return code, out.getvalue(), err.getvalue()


VALUES = st.one_of(
    st.just(GONE),
    st.none() | st.booleans() | st.integers() | st.floats(),
    st.sampled_from([-1, 0, 2**63, 10**400, 1e308, -1e308, 5e-324, 1e-200, 1e99, -1e99, 1e-99]),
    st.sampled_from(
        ["", "absent", "a/a", "pilot", "less", "neither", "ext4", "s", "B/s", "a, b", "\x1b[31m", "\ud800"]
    ),
    st.lists(st.none() | st.integers() | st.floats() | st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.none() | st.integers() | st.text(max_size=3), max_size=2),
)


@st.composite
def changes(draw):
    """Return the name of a file, the way to one of its values, and what that becomes."""
    name = draw(st.sampled_from(BROKEN))
    inner, way = MADE[name], []
    while isinstance(inner, dict | list) and inner and (not way or draw(st.integers(0, 4))):
        way.append(draw(st.sampled_from(sorted(inner) if isinstance(inner, dict) else range(len(inner)))))
        inner = inner[way[-1]]
    return name, way, draw(VALUES)


def changed(document, way, value):
    found = copy.deepcopy(document)
    inner = found
    for step in way[:-1]:
        inner = inner[step]
    if value is GONE:
        del inner[way[-1]]
    else:
        inner[way[-1]] = value
    return found


@given(change=changes())
@pytest.mark.timeout(1800)
def test_whatever_one_value_has_become_there_is_no_traceback(folders, change):
    sound, damaged = folders
    name, way, value = change
    path = damaged / name
    path.write_text(json.dumps(changed(MADE[name], way, value)))
    try:
        for words in commands(sound, damaged):
            code, out, err = said_by(*words)
            assert code in {0, 1}
            if words[0] == "show":
                # What is damaged is named, and what is shown is whole.
                assert (code == 1) == (str(path) in out + err)
    finally:
        path.write_text(json.dumps(MADE[name]))


DAMAGES = [
    ("0001-real.json", ["layouts", "before"], {}),
    ("0001-real.json", ["layouts", "before", "points"], [[1, 2]]),
    ("0001-real.json", ["commands"], [5]),
    ("0001-real.json", ["host", "device", "below"], {"name": "sda"}),
    ("0001-real.json", ["host", "virtualisation"], ["kvm"]),
    ("0001-real.json", ["host", "memory_bytes"], 10**400),
    ("0001-real.json", ["parameters", "size_bytes"], "1G"),
    ("0001-real.json", ["kind"], "measure"),
    ("0001-real.json", ["provisioned", "path"], [[[]]] * 2 + [json.loads("[" * 400 + "]" * 400)]),
    ("0002-drawn.json", ["metrics", "update_first_s"], 1e-320),
    ("0003-timed.json", ["axes", "reads_after"], GONE),
    ("0003-timed.json", ["axes", "reads_after", "x"], None),
    ("0003-timed.json", ["infos", "reads_after", "headline"], "yes"),
    ("0003-timed.json", ["checks"], [True]),
    ("run.json", ["arguments", "stacks"], 5),
]


@pytest.mark.parametrize(("name", "way", "value"), DAMAGES, ids=[".".join(map(str, way)) for _, way, _ in DAMAGES])
def test_what_is_damaged_is_named_and_the_others_are_shown(folders, name, way, value):
    sound, damaged = folders
    path = damaged / name
    path.write_text(json.dumps(changed(MADE[name], way, value)))
    try:
        code, out, err = said_by("show", damaged)
        assert code == 1
        assert f"{path} is damaged: " in err
        assert "btrfs ÷ ext4" in out
        code, out, err = said_by("compare", sound, damaged)
        assert code == 1
        assert f"{path} is damaged: " in err
        assert "a comparison of the other files would mislead" in err
    finally:
        path.write_text(json.dumps(MADE[name]))
