"""The published experiments as they were repeated: the page says what the committed samples show."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from bench.published import REPETITIONS, chart, figures, report, unpacked
from snapmgr.bench.published.judgement import compare_published

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


def test_the_page_begins_with_five_sentences_and_the_picture_that_the_samples_make(samples):
    head = PAGE.read_text(encoding="utf-8").partition("Two experiments are often quoted")[0]
    assert re.findall(r"^\d\.", head, flags=re.MULTILINE) == [f"{number}." for number in range(1, 6)]
    assert "'int' object is not iterable" in head
    assert "(published-experiments.svg)" in head
    picture = chart(samples)
    assert PAGE.with_suffix(".svg").read_text(encoding="utf-8") == picture
    ET.fromstring(picture)  # noqa: S314 - our own
    # The figures in the sentences are those of the samples.
    rows = {(row["experiment"], row["key"]): row["ours"] for row in compare_published(samples)["rows"]}
    for key in ("random-update/update-durable", "random-update/read", "blog/reads-after"):
        assert rows[f"{key.split('/')[0]} repaired", key]["ratio_text"] in head


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
