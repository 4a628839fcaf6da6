"""How far the model of InnoDB is swept, what it refuses, and which kernels had the published regression."""

from __future__ import annotations

import pytest

from snapmgr.bench.model import PROFILES, Parameters, Stack
from snapmgr.bench.scenarios.innodb_io import scenario
from snapmgr.contract.errors import ConfigError
from snapmgr.system.host import regression_side

_MIB = 1 << 20


def _given(**changed):
    values = {"profile": "smoke", "variant": "", "size_bytes": 0, "memory_bytes": 1 << 34, "seed": 1}
    return Parameters(**(values | changed))


@pytest.mark.parametrize(
    ("kernel", "side"),
    [
        ("4.4.0-210-generic", "before"),
        ("4.8.17", "before"),
        ("4.9", "within"),
        ("4.19.0-27-amd64", "within"),
        ("5.5.19", "within"),
        ("5.6.0-rc1", "after"),
        ("5.10.0", "after"),
        ("6.1.0-30-amd64", "after"),
        ("10.0", "after"),
    ],
)
def test_kernel_is_on_its_side_of_the_regression(kernel, side):
    assert regression_side(kernel) == side


@pytest.mark.parametrize("kernel", ["", "Linux", "v5.4", "5"])
def test_what_is_no_kernel_is_on_no_side(kernel):
    with pytest.raises(ValueError, match="not a kernel release"):
        regression_side(kernel)


@pytest.mark.parametrize("profile", PROFILES)
def test_every_profile_is_completed_once(profile):
    made = scenario.parameters(_given(profile=profile))
    assert scenario.parameters(made) == made
    needs = scenario.needs(made)
    assert needs.space_bytes > made.size_bytes
    assert needs.seconds > len(made.extra["threads"]) * made.extra["point_s"]


def test_larger_profiles_reach_the_published_512_threads():
    for profile in ("quick", "standard", "paper"):
        assert scenario.parameters(_given(profile=profile)).extra["threads"][-1] == 512


def test_method_by_the_page_cache_needs_data_larger_than_memory():
    assert scenario.parameters(_given(memory_bytes=64 * _MIB)).extra["methods"] == ("direct",)
    assert scenario.parameters(_given(memory_bytes=63 * _MIB)).extra["methods"] == ("direct", "dsync")
    with pytest.raises(ConfigError, match="through the page cache") as caught:
        scenario.parameters(_given(extra={"methods": ["dsync"]}))
    assert "limit the memory" in caught.value.hint


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"size_bytes": _MIB}, "too few"),
        ({"extra": {"threads": [1, 0]}}, r"\[0\]"),
        ({"extra": {"threads": []}}, "none"),
        ({"extra": {"threads": [5000]}}, r"\[5000\]"),
        ({"extra": {"methods": ["fsync"]}}, "fsync"),
        ({"extra": {"methods": []}}, "methods"),
    ],
)
def test_what_makes_no_sense_is_refused(changed, words):
    with pytest.raises(ConfigError, match=words):
        scenario.parameters(_given(**changed))


def test_it_is_for_the_controls():
    assert scenario.suits(Stack(name="ext4", title="", backend=None)) is None
    assert "without snapshots" in scenario.suits(Stack(name="btrfs", title="", backend="btrfs"))


def test_metrics_are_named_once_and_have_a_headline():
    names = [info.name for info in scenario.metrics]
    assert len(names) == len(set(names))
    assert [info.name for info in scenario.metrics if info.headline] == ["iops_best_direct"]
