"""The example that `config init` prints, and the documentation: valid, and naming every key."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.config.example import example_config
from snapmgr.config.load import load_config
from snapmgr.config.model import Check, Job, Mode, Prepare, Quiesce, Retention, Source, Step, Strategy, Tool, Verify
from snapmgr.contract.errors import ConfigError

DOCUMENTATION = Path(__file__).parents[3] / "docs/reference/configuration.md"


@pytest.mark.parametrize(
    ("found", "job"),
    [
        ({}, None),
        ({"datadir": "/d"}, None),
        ({"socket": "/s"}, {"socket": "/s"}),
        ({"socket": "/s", "datadir": "/d"}, {"socket": "/s", "datadir": "/d"}),
        ({"defaults_file": "/f"}, {"defaults_file": "/f"}),
        ({"socket": "/s", "defaults_file": "/f"}, {"defaults_file": "/f"}),
    ],
)
def test_the_example_is_valid_and_has_what_was_found(write, found, job):
    config = load_config(write(example_config(**found)))
    if job is None:
        assert config.jobs == {}
    else:
        assert config.job("mysql").retention.keep_daily == 7
        assert {key: getattr(config.job("mysql"), key) for key in ("socket", "defaults_file", "datadir")} == {
            "socket": None,
            "defaults_file": None,
            "datadir": None,
        } | job


def test_the_example_names_every_key():
    text = example_config(socket="/s") + example_config(defaults_file="/f")
    advanced = {"sync_target", "settle_timeout", "server", "options", "defaults"}
    keys = {"state_dir", "scratch_dir"}
    for kind in (Job, Verify, Retention):
        keys |= set(kind.__struct_encode_fields__) - {"name"}
    assert {key for key in keys - advanced if key not in text} == set()


def test_the_commented_jobs_of_the_example_are_valid_too(write):
    lines = example_config().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith("# [job.mysql]"))
    uncommented = [line.removeprefix("# ") for line in lines[start:] if not line.startswith(("# #", "# A plain"))]
    # Prose and alternatives stay comments: they do not parse as TOML.
    kept = [line for line in uncommented if line.startswith("[") or "=" in line.partition("#")[0]]
    kept = [line for line in kept if not line.startswith(("defaults_file", "user"))]
    config = load_config(write("\n".join(kept)))
    assert set(config.jobs) == {"mysql", "staged", "files"}


@given(st.text(min_size=1).filter(lambda text: "\0" not in text))
def test_any_path_survives_the_example(path):
    job = tomllib.loads(example_config(socket="/" + path, datadir="/" + path))["job"]["mysql"]
    assert (job["socket"], job["datadir"]) == ("/" + path, "/" + path)


def test_a_path_that_toml_cannot_hold_is_refused():
    with pytest.raises(ConfigError, match="not UTF-8"):
        example_config(socket=os.fsdecode(b"/run/\xff.sock"))


def test_the_documentation_names_every_key_and_every_allowed_word():
    text = DOCUMENTATION.read_text()
    words = {"state_dir", "scratch_dir"}
    for kind in (Job, Verify, Prepare):
        words |= set(kind.__struct_encode_fields__) - {"name"}
    words |= {word for part in (Quiesce, Source, Check, Step, Tool, Mode, Strategy) for word in part.__args__}
    assert {word for word in words if f"`{word}`" not in text and f'`"{word}"`' not in text} == set()
    retention = (DOCUMENTATION.parent / "retention.md").read_text()
    assert {key for key in Retention.__struct_encode_fields__ if key not in retention} == set()


def test_the_documentations_example_is_valid(write):
    (example,) = re.findall(r"```toml\n(.*?)```", DOCUMENTATION.read_text(), re.DOTALL)
    config = load_config(write(example))
    assert config.job("uploads").retention == Retention(keep_hourly=48, keep_daily=7)
    assert config.job("shop").after_backup == ("verify", "prune")
