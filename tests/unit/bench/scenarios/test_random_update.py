"""How large the published experiment is in each profile and variant, what it refuses, and its proofs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.api import Usage
from snapmgr.bench.measure.digests import digest_units
from snapmgr.bench.model import PROFILES, Outcome, Parameters
from snapmgr.bench.published import script
from snapmgr.bench.scenarios import random_update
from snapmgr.bench.scenarios.random_update import scenario
from snapmgr.contract.errors import ConfigError

_MIB = 1 << 20


def _given(**changed):
    values = {"profile": "smoke", "variant": "", "size_bytes": 0, "memory_bytes": 64 * _MIB, "seed": 1}
    return Parameters(**(values | changed))


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("variant", scenario.variants)
def test_every_profile_and_variant_has_its_size(profile, variant):
    made = scenario.parameters(_given(profile=profile, variant=variant))
    units = made.extra["data_bytes"] // made.extra["unit_bytes"]
    assert made.extra["data_bytes"] % (made.extra["unit_bytes"] * made.extra["workers"]) == 0
    assert 0 < made.extra["updates"] <= units
    needs = scenario.needs(made)
    assert needs.space_bytes > made.size_bytes
    assert needs.seconds > 0
    # Once completed they stay as they are.
    assert scenario.parameters(made) == made


def test_paper_is_as_large_as_published():
    made = scenario.parameters(_given(profile="paper", variant="repaired"))
    assert (made.extra["data_bytes"], made.extra["unit_bytes"]) == (100_000_000_000, 4000)
    assert (made.extra["updates"], made.extra["workers"]) == (250_000, 8)


def test_database_is_the_default_and_its_pages_are_of_innodb():
    made = scenario.parameters(_given())
    assert (made.variant, made.extra["unit_bytes"], made.extra["workers"]) == ("database", 16384, 1)
    # Two files: one is updated with no snapshot there.
    assert made.extra["data_bytes"] * 2 == made.size_bytes


@given(st.integers(8 * _MIB, 1 << 40))
def test_what_fio_fills_in_pieces_of_a_mib_is_the_whole_file(size_bytes):
    made = scenario.parameters(_given(size_bytes=size_bytes))
    assert made.extra["data_bytes"] % _MIB == 0
    assert size_bytes - 2 * _MIB < made.extra["data_bytes"] * 2 <= size_bytes


@pytest.mark.parametrize("variant", ["repaired", "printed"])
def test_buffered_variant_of_data_that_fit_into_memory_is_refused(variant):
    fits = _given(variant=variant, size_bytes=64 * _MIB, memory_bytes=64 * _MIB)
    with pytest.raises(ConfigError, match="64.0 MiB of data fit into memory") as caught:
        scenario.parameters(fits)
    assert "limit the memory" in caught.value.hint
    scenario.parameters(_given(variant=variant, size_bytes=65 * _MIB, memory_bytes=64 * _MIB))
    scenario.parameters(_given(variant="database", size_bytes=64 * _MIB, memory_bytes=64 * _MIB))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"variant": "misprinted"}, "no variant 'misprinted'"),
        ({"size_bytes": _MIB}, "too few"),
        ({"extra": {"updates": 10_000_000}}, "more than"),
    ],
)
def test_what_makes_no_sense_is_refused(changed, words):
    with pytest.raises(ConfigError, match=words):
        scenario.parameters(_given(**changed))


@given(st.integers(9 * _MIB, 1 << 42), st.sampled_from(PROFILES), st.sampled_from(scenario.variants))
def test_any_size_is_made_of_whole_parts(size_bytes, profile, variant):
    made = scenario.parameters(_given(profile=profile, variant=variant, size_bytes=size_bytes, memory_bytes=_MIB))
    extra = made.extra
    assert extra["data_bytes"] % extra["workers"] == 0
    share = extra["data_bytes"] // extra["workers"]
    assert share % extra["unit_bytes"] == 0
    # Each worker finds as many pieces in its part as it is to write.
    assert extra["updates"] // extra["workers"] <= share // extra["unit_bytes"]
    assert extra["updates"] % extra["workers"] == 0
    assert made.size_bytes == size_bytes


def test_metrics_are_named_once_and_have_a_headline():
    names = [info.name for info in scenario.metrics]
    assert len(names) == len(set(names))
    assert {info.name for info in scenario.metrics if info.headline} == {"update_first_s", "read_after_bytes_s"}


@pytest.mark.parametrize("unit_bytes", [1, 7, 4000, 4096, 5_000_000])
def test_changed_pieces_are_counted(tmp_path, unit_bytes):
    file = tmp_path / "file"
    content = bytearray(unit_bytes * 9 + 1)
    file.write_bytes(content)
    before = digest_units(file, unit_bytes)
    assert len(before.digests) == (9 * unit_bytes + 1 if unit_bytes == 1 else 10)
    assert before.changed(file) == 0
    content[0] = content[-1] = content[unit_bytes * 4] = 1
    file.write_bytes(content)
    assert before.changed(file) == 3
    file.write_bytes(content[:unit_bytes])
    assert before.changed(file) == len(before.digests)
    file.write_bytes(b"")
    assert before.changed(file) == len(before.digests)


class _Lost:
    create_s = whole_s = 0.1
    deleted = False

    def usage(self):
        return Usage(exclusive_bytes=None, valid=False)

    def delete(self):
        self.deleted = True
        return 0.2


def test_snapshot_that_the_storage_lost_fails_the_sample_and_is_deleted(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    found, lost = Outcome(), _Lost()
    random_update._judge(found, lost, digest_units(tmp_path / "file", 4000))
    (check,) = found.checks
    assert not check.ok
    assert "ran full" in check.detail
    assert found.metrics == {"create_s": 0.1, "whole_s": 0.1, "delete_s": 0.2}
    assert lost.deleted
    assert "not known" in found.notes[0]


def _printed(phase, file, file_bytes, updates=0):
    text = Path(script.__file__).read_text()
    return subprocess.run(
        [sys.executable, "-I", "-c", text, phase, str(file), str(file_bytes), str(updates), "5"],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def test_printed_script_keeps_its_shared_offset(tmp_path):
    file, file_bytes = tmp_path / "file", 8_000_000
    # A race of its workers: on a busy machine they may happen to run one after another.
    for _ in range(10):
        filled = _printed("fill", file, file_bytes)
        assert json.loads(filled.stdout)["seconds"] > 0, filled.stderr
        status = file.stat()
        if status.st_size > file_bytes:
            break
        file.unlink()
    # All that was meant is written, but behind the last seek of any worker: further than it should be, with holes.
    assert status.st_size > file_bytes
    assert status.st_blocks * 512 < status.st_size
    before = digest_units(file, 4000)
    assert json.loads(_printed("update", file, file_bytes, 64).stdout)["seconds"] > 0
    assert file.stat().st_size >= status.st_size
    assert 0 < before.changed(file) <= 3 * 64
    assert json.loads(_printed("read", file, file_bytes).stdout)["seconds"] > 0
    assert _printed("fill", tmp_path / "none" / "file", file_bytes).returncode != 0


def test_printed_script_tells_of_a_full_disk():
    done = _printed("fill", "/dev/full", 8_000_000)
    assert done.returncode == 1
    assert "No space left on device" in done.stderr
    assert done.stdout == ""
