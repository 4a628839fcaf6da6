"""The example that `config init` prints, and the documentation: valid, and naming every key."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.config.example import example_config, job_names
from snapmgr.config.load import load_config, validate
from snapmgr.config.model import Check, Job, Mode, Prepare, Quiesce, Retention, Source, Step, Strategy, Tool, Verify
from snapmgr.contract.errors import ConfigError

DOCUMENTATION = Path(__file__).parents[3] / "docs/reference/configuration.md"


@pytest.mark.parametrize(
    ("found", "defaults_file", "job"),
    [
        (("/s", None), None, {"socket": "/s"}),
        (("/s", "/d"), None, {"socket": "/s", "datadir": "/d"}),
        (("/s", "/d"), "/f", {"defaults_file": "/f", "datadir": "/d"}),
    ],
)
def test_the_example_is_valid_and_has_what_was_found(write, found, defaults_file, job):
    config = load_config(write(example_config([found], defaults_file=defaults_file)))
    nothing = {"socket": None, "defaults_file": None, "datadir": None}
    assert {key: getattr(config.job("mysql"), key) for key in nothing} == nothing | job
    assert set(config.jobs) == {"mysql"}


def test_without_a_server_there_is_no_job(write):
    assert load_config(write(example_config())).jobs == {}


def test_each_server_gets_a_job_that_verifies_and_prunes(write):
    config = load_config(write(example_config([("/a", "/var/lib/mysql"), ("/b", "/srv/shop/mysql"), ("/c", None)])))
    assert {name: (job.socket, job.datadir) for name, job in config.jobs.items()} == {
        "mysql": ("/a", "/var/lib/mysql"),
        "shop": ("/b", "/srv/shop/mysql"),
        "mysql-2": ("/c", None),
    }
    for job in config.jobs.values():
        assert job.after_backup == ("verify", "prune")
        assert job.retention.keep_daily == 7


@pytest.mark.parametrize(
    ("datadirs", "names"),
    [
        (["/srv/shop/data"], ["mysql"]),
        (["/srv/shop/data", "/srv/blog/data"], ["shop", "blog"]),
        (["/var/lib/mysql", "/var/lib/mysql-replica"], ["mysql", "mysql-replica"]),
        (["/data/mysql/3306", "/data/mysql/3307"], ["3306", "3307"]),
        (["/a/shop", "/b/shop", "/c/shop"], ["shop", "shop-2", "shop-3"]),
        (["/a/shop-2", "/b/shop", "/c/shop"], ["shop-2", "shop", "shop-3"]),
        (["/srv/latest", "/srv/Büro 1/db"], ["mysql", "B-ro-1"]),
    ],
)
def test_several_jobs_are_named_after_their_datadirs(datadirs, names):
    assert job_names(datadirs) == names


@given(st.lists(st.none() | st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=1, max_size=6))
def test_any_datadirs_give_different_names_that_a_job_may_have(tmp_path_factory, datadirs):
    path = tmp_path_factory.mktemp("example") / "snapmgr.toml"
    path.write_text(example_config([(f"/{n}", datadir and f"/{datadir}") for n, datadir in enumerate(datadirs)]))
    assert not [problem for problem in validate(path) if ".datadir:" not in problem]
    assert len(set(job_names(datadirs))) == len(datadirs)


@pytest.mark.parametrize("defaults_file", [None, "/etc/my.cnf"])
def test_a_server_without_a_binary_log_gets_a_job_that_can_run(write, defaults_file):
    text = example_config([("/s", None)], defaults_file=defaults_file, without_binlog={"/s"})
    assert load_config(write(text)).job("mysql").position == "best"
    assert "log_bin is off" in text
    two = example_config([("/s", "/srv/a"), ("/t", "/srv/b")], without_binlog={"/t"})
    assert [job.position for job in load_config(write(two)).jobs.values()] == ["exact", "best"]


def test_the_example_names_every_key():
    text = example_config([("/s", None)]) + example_config([("/s", None)], defaults_file="/f")
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
    job = tomllib.loads(example_config([("/" + path, "/" + path)]))["job"]["mysql"]
    assert (job["socket"], job["datadir"]) == ("/" + path, "/" + path)


def test_a_path_that_toml_cannot_hold_is_refused():
    with pytest.raises(ConfigError, match="not UTF-8"):
        example_config([(os.fsdecode(b"/run/\xff.sock"), None)])


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
