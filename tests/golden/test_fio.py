"""What fio 3.33 printed and logged for two sections, one of which made pauses, is read as it is meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from snapmgr.bench.fio import FioRun, parse_document, read_windows

_FOLDER = Path(__file__).parent / "fio"


@pytest.fixture(scope="module")
def run():
    document = parse_document((_FOLDER / "mixed.txt").read_text())
    log = (_FOLDER / "mixed-writers_bw.txt").read_text()
    return FioRun(document=document, job_file="", windows={"writers": read_windows(log, 5.1)})


def test_document_is_found_behind_notes(run):
    assert (_FOLDER / "mixed.txt").read_text().startswith("note: ")
    assert [report["jobname"] for report in run.document["jobs"]] == ["writers", "reader"]


def test_sections_are_apart(run):
    assert run.ios("read", "reader") == 2048
    assert run.moved_bytes("read", "reader") == 8 << 20
    assert run.ios("write", "reader") == 0
    assert run.ios("read") == run.ios("read", "reader") + run.ios("read", "writers")
    assert run.ios("sync", "writers") > 0
    with pytest.raises(KeyError):
        run.ios("read", "read")


def test_rates_are_those_that_fio_reckons(run):
    for section, direction in (("reader", "read"), ("writers", "read"), ("writers", "write")):
        (report,) = [one for one in run.document["jobs"] if one["jobname"] == section]
        # fio divides by each direction's own time, which may be a little shorter.
        assert run.iops(direction, section) == pytest.approx(report[direction]["iops"], rel=0.01)


def test_percentiles_are_those_that_fio_reckons(run):
    compared = 0
    for report in run.document["jobs"]:
        for direction, kind in (("read", "clat_ns"), ("write", "clat_ns"), ("sync", "lat_ns")):
            for percentile, nanoseconds in report[direction].get(kind, {}).get("percentile", {}).items():
                found = run.latency_s(direction, float(percentile) / 100, report["jobname"])
                assert found == pytest.approx(nanoseconds / 1e9, rel=1e-9), (report["jobname"], direction, percentile)
                compared += 1
    assert compared >= 4 * 17


def test_maximum_is_exact_and_the_quantiles_are_in_order(run):
    (report,) = [one for one in run.document["jobs"] if one["jobname"] == "reader"]
    found = run.latencies_s("read", "reader")
    assert list(found) == ["p50", "p99", "p99.9", "max"]
    assert found["max"] == report["read"]["clat_ns"]["max"] / 1e9
    assert found["p50"] <= found["p99"] <= found["p99.9"]
    assert run.latencies_s("write", "reader") == {}


def test_pauses_are_windows_without(run):
    # 300 operations at once every 1.7 s: nothing begins between 2 and 3 s, nor after 3.4 s and before 5.1 s.
    windows = run.windows["writers"]
    assert [bool(rate) for rate in windows.read] == [True, True, False, True, False]
    assert (windows.without_read, windows.without_write, windows.without_either) == (2, 2, 2)
    # 300 operations of two jobs, half of them writes, in the first second.
    assert windows.write[0] + windows.read[0] == pytest.approx(2 * 300 * 4096, rel=0.1)
