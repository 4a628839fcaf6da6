"""The published experiments as they were repeated: the page says what the committed samples show."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.published import REPETITIONS, figures, report, unpacked

ROOT = Path(__file__).parents[4]
ARCHIVE = ROOT / "tests" / "golden" / "bench" / "published.tar.xz"
PLAIN = ARCHIVE.with_name("published-plain.tar.xz")
PAGE = ROOT / "docs" / "explanation" / "published-experiments.md"


@pytest.fixture(scope="module")
def samples():
    return unpacked(ARCHIVE)


@pytest.fixture(scope="module")
def plain():
    return unpacked(PLAIN)


def test_the_page_has_the_tables_that_the_samples_make(samples, plain):
    page = PAGE.read_text(encoding="utf-8").splitlines()
    missing = [line for line in (*report(samples, plain), *figures(samples)) if line not in page]
    assert missing == []


def test_the_samples_are_of_the_experiments_and_tell_no_name(samples, plain):
    experiments = {(one.scenario, one.variant) for one in REPETITIONS}
    for sample in (*samples, *plain):
        assert (sample["scenario"], sample["variant"]) in experiments
        host = sample["host"]
        assert not host.get("host")
        assert host["device"]["rotational"] == (sample in samples)
        assert (host["virtualisation"]["vm"], host["target"]["identified_by"]) == ("uml", "device-mapper")


def test_data_did_not_fit_into_memory(samples):
    assert all(sample["parameters"]["size_bytes"] > sample["host"]["memory_bytes"] for sample in samples)
