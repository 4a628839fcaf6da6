"""`trace show` on recorded logs: tables, JSON, files, and what is said of damaged ones."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from snapmgr.cli.main import main

GOLDEN = Path(__file__).parents[2] / "golden" / "trace"
KINDS = str(GOLDEN / "kinds.log")


def test_tables_and_the_verdict(capsys):
    assert main(["trace", "show", KINDS, "--top", "2"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("95 operations in 12.1 s; 0.0 under way on average, 2 at most; 2.5 ms in fsync")
    assert [line.split()[0] for line in lines if "COUNT" in line] == ["OPERATION", "FILE", "THREAD"]
    assert lines[3].split()[:3] == ["getattr", "15", "-"]
    assert "… and 25 more" in lines
    assert any(line.startswith("verdict: program: ") for line in lines)
    assert "the file has no counters of the mount, so missing operations cannot be detected" in err


def test_a_log_with_a_hole_has_no_verdict_and_says_so_everywhere(capsys, tmp_path):
    lines = gzip.decompress((GOLDEN / "reads.log.gz").read_bytes()).splitlines(keepends=True)
    path, page, viewer = (tmp_path / name for name in ("cut.log", "cut.html", "cut.json"))
    path.write_bytes(b"".join(lines[: len(lines) // 5] + lines[len(lines) * 4 // 5 :]))
    assert main(["trace", "show", str(path), "-o", str(page), "--perfetto", str(viewer)]) == 0
    assert [
        event["dur"] > 300_000 for event in json.loads(viewer.read_text())["traceEvents"] if event.get("cat") == "hole"
    ] == [True]
    out, err = capsys.readouterr()
    assert "verdict: unknown: for " in out
    assert "nothing to tune" not in out
    assert "the program was idle, or lines are missing" in err
    assert "the program was idle, or lines are missing" in page.read_text()
    assert "so there is no verdict" in page.read_text()
    assert main(["trace", "show", str(path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"]["findings"][0]["bottleneck"] == "unknown"
    (hole,) = document["analysis"]["holes"]
    assert hole["to_us"] - hole["from_us"] > 0.5 * (document["analysis"]["last_us"] - document["analysis"]["first_us"])
    assert len(document["analysis"]["caveats"]) == 2


@pytest.mark.parametrize("by", ["operation", "file", "thread"])
def test_one_table(capsys, by):
    assert main(["trace", "show", KINDS, "--by", by]) == 0
    heads = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "COUNT" in line]
    assert heads == [by.upper()]


def test_one_document(capsys):
    assert main(["trace", "show", KINDS, "--json", "--top", "1", "--by", "file"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["command"] == "trace show"
    assert document["recording"] is document["truncated"] is document["analysis"]["missing"] is None
    (only,) = document["analysis"]["totals"]["file"]
    assert (only["key"], only["count"], only["failed"]) == ("d", 31, 8)
    assert list(document["analysis"]["totals"]) == ["file"]
    assert document["verdict"]["findings"][0]["action"] == "record"
    assert document["verdict"]["condition"].startswith("only if no line is missing")
    counters, silence = document["analysis"]["caveats"]
    assert counters == "the file has no counters of the mount, so missing operations cannot be detected"
    assert silence.startswith("for 500 ms the log has no operation, and no mark of an idle mount")


def test_a_log_from_stdin(capsys, monkeypatch):
    packed = gzip.compress((GOLDEN / "older.log").read_bytes())
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(packed)))
    assert main(["trace", "show", "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["analysis"]["operations"] == 9


def test_what_is_damaged_or_cut_off_is_said(capsys, tmp_path):
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress((GOLDEN / "cloud.oplog").read_bytes() + b"rubbish\n")[:-9])
    assert main(["trace", "show", str(path)]) == 0
    err = capsys.readouterr().err
    assert "the file is cut off: only part of it could be read" in err
    assert "1 lines are not from a JuiceFS log" in err
    assert "2 lines have no time" in err


def test_a_page_and_a_file_for_viewers(capsys, tmp_path):
    page, events = tmp_path / "log.html", tmp_path / "log.json"
    assert main(["trace", "show", KINDS, "-o", str(page), "--perfetto", str(events)]) == 0
    assert page.read_text().lower().startswith("<!doctype html>")
    written = json.loads(events.read_bytes())["traceEvents"]
    assert len([event for event in written if event.get("cat") == "juicefs"]) == 95
    assert str(page) in capsys.readouterr().err
    assert main(["trace", "show", KINDS, "-o", str(tmp_path / "none" / "log.html")]) == 1
    assert "there is no folder" in capsys.readouterr().err
    assert main(["trace", "show", KINDS, "-o", str(tmp_path)]) == 2


def test_a_file_s_name_cannot_write_to_the_terminal(capsys, tmp_path):
    path = tmp_path / "log"
    entry = "(5,[-rw-r--r--:0100644,1,0,0,1,1,1,0]) - OK <0.000001>\n"
    path.write_text(f"2026.11.21 08:56:01.000000 [uid:0,gid:0,pid:1] lookup (1,\x1b[31mred): {entry}" * 2)
    assert main(["trace", "show", str(path)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_what_is_no_log_is_refused(capsys, tmp_path):
    assert main(["trace", "show", str(tmp_path / "none")]) == 1
    assert main(["trace", "show", str(Path(__file__))]) == 1
    assert "is not a JuiceFS log of operations" in capsys.readouterr().err
