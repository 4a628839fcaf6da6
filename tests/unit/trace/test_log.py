"""The reader of logs: exact, whatever the pieces, and never surprised."""

from __future__ import annotations

import gzip
import random
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.contract.errors import NotFoundError, SnapmgrError
from snapmgr.trace.accesslog import Reader
from snapmgr.trace.line import read_line, time_us
from snapmgr.trace.reading import read_trace
from support.accesslog import read_blocks

# As recorded on a real mount.
WRITE = b"2026.11.21 08:56:01.405333 [uid:0,gid:0,pid:9448] write (1028,16384,0,52) - OK <0.000102>\n"
READ = b"2026.11.21 08:55:59.630180 [uid:0,gid:0,pid:9445] read (1031,4096,0,45): (286) - OK <0.019611>\n"
FSYNC = b"2026.11.21 08:56:01.917182 [uid:0,gid:0,pid:9448] fsync (1239,1) - OK <0.435846>\n"
COLUMNS = ("end_us", "duration_us", "thread", "name", "inode", "size", "offset", "got", "status")


def row(operations, at):
    return {column: getattr(operations, column)[at] for column in COLUMNS} | {
        "name": operations.names[operations.name[at]],
        "status": operations.statuses[operations.status[at]],
    }


def test_the_recorded_lines():
    operations = read_blocks([WRITE + READ + b"#\n" + FSYNC]).operations
    second = int(datetime(2026, 11, 21, 8, 56, 1, tzinfo=UTC).timestamp()) * 1_000_000
    assert [row(operations, at) for at in range(3)] == [
        dict(zip(COLUMNS, (second + 405333, 102, 9448, "write", 1028, 16384, 0, 16384, "OK"), strict=True)),
        dict(zip(COLUMNS, (second - 1_369_820, 19611, 9445, "read", 1031, 4096, 0, 286, "OK"), strict=True)),
        dict(zip(COLUMNS, (second + 917182, 435846, 9448, "fsync", 1239, 0, 0, 0, "OK"), strict=True)),
    ]
    assert operations.skipped == 0


@given(st.dates(min_value=datetime(2000, 1, 1, tzinfo=UTC).date(), max_value=datetime(2999, 12, 31, tzinfo=UTC).date()))
def test_dates_are_the_calendar_s(date):
    assert time_us(date.year, date.month, date.day, 0) == (date.toordinal() - 719_163) * 86_400_000_000


numbers = st.integers(0, 10**19 - 1)
# "\n" ends a line; the client writes it as "\\n".
names = st.text(st.characters(exclude_characters="\n", codec="utf-8"), min_size=1, max_size=30)
ends = st.sampled_from(["OK", "no such file or directory", "input/output error", "operation not permitted"])


@st.composite
def lines(draw):
    """A line of either form, and what it says."""
    new = draw(st.booleans())
    kind = draw(st.sampled_from(["read", "write", "fsync", "unlink", "lookup"]))
    status, thread, inode = draw(ends), draw(st.integers(0, 2**32 - 1)), draw(numbers)
    size, offset, got = draw(numbers), draw(numbers), draw(st.integers(0, 10**6))
    at = draw(st.datetimes(datetime(2000, 1, 1), datetime(2999, 12, 31)))  # noqa: DTZ001 - the log's, of no zone
    whole, micro = draw(st.integers(0, 999)), draw(st.integers(0, 999_999))
    arguments = {
        "read": f"{inode},{size},{offset},7",
        "write": f"{inode},{size},{offset},7",
        "fsync": f"{inode},1",
        "unlink": f"{inode},{draw(names)}",
        "lookup": f"{inode},{draw(names)}",
    }[kind]
    result = {"read": f"({got})", "lookup": "" if status != "OK" else "(5,[drwxr-xr-x:0040755,2])"}.get(kind)
    if new:
        shown = f"{kind} ({arguments})" + (f": {result}" if result is not None else "") + f" - {status}"
    else:
        shown = f"{kind} ({arguments}): {status}" + (f" {result}" if result else "")
    text = f"{at:%Y.%m.%d %H:%M:%S.%f} [uid:1,gid:2,pid:{thread}] {shown} <{whole}.{micro:06}>"
    transfer = kind in {"read", "write"}
    moved = {"read": got, "write": size}.get(kind, 0)
    values = (
        int(at.replace(microsecond=0, tzinfo=UTC).timestamp()) * 1_000_000 + at.microsecond,
        whole * 1_000_000 + micro,
        thread,
        kind,
        inode,
        size if transfer else 0,
        offset if transfer else 0,
        moved if status == "OK" else 0,
        status,
    )
    return text, dict(zip(COLUMNS, values, strict=True))


@given(st.lists(lines(), max_size=20), st.integers(1, 400))
def test_what_is_written_is_read_however_it_is_cut(written, piece):
    data = "".join(f"{text}\n" for text, _ in written).encode()
    operations = read_blocks(data[at : at + piece] for at in range(0, len(data), piece)).operations
    assert operations.skipped == 0
    assert [row(operations, at) for at in range(len(operations))] == [values for _, values in written]


@given(st.lists(st.binary(max_size=300) | st.sampled_from([WRITE, READ, FSYNC, b"\n", b"#\n"]), max_size=20))
def test_nothing_surprises_it(pieces):
    operations = read_blocks(pieces).operations
    assert len({len(getattr(operations, column)) for column in COLUMNS}) == 1
    # No line is lost without being counted.
    found = [line.removesuffix(b"\r") for line in b"".join(pieces).split(b"\n")]
    assert len(operations) + operations.skipped == sum(1 for line in found if line not in {b"", b"#"})


@given(st.sampled_from([WRITE, READ, FSYNC]), st.data())
def test_a_damaged_line_is_skipped_or_still_one_line(line, data):
    at = data.draw(st.integers(0, len(line) - 2))
    broken = line[:at] + data.draw(st.binary(max_size=3)) + line[at + 1 :]
    operations = read_blocks([WRITE + broken + FSYNC]).operations
    assert operations.names[operations.name[0]] == "write"
    assert operations.names[operations.name[-1]] == "fsync"
    # The one way and the other agree on what is a line.
    for text in broken.removesuffix(b"\n").split(b"\n"):
        assert (len(read_blocks([text]).operations) == 1) == (read_line(text.removesuffix(b"\r")) is not None)


def test_an_endless_line_does_not_fill_the_memory():
    operations = read_blocks([WRITE, *[b"x" * 100_000] * 50, b"\n" + READ]).operations
    assert (len(operations), operations.skipped) == (2, 1)


def test_what_is_remembered_of_long_logs_is_bounded():
    front = "2026.11.%02d %02d:00:%02d.000001 [uid:0,gid:0,pid:1] "
    lines = []
    for number in range(105_000):
        at = front % (1 + number % 28, number % 23, number % 59)
        lines.append(
            at + (f"write ({number},16,0,1) - OK <0.000002>\n" if number % 70 else "fsync (1,1) - OK <1.000000>\n")
        )
    reader = Reader()
    for at in range(0, len(lines), 5000):
        reader.feed("".join(lines[at : at + 5000]).encode())
    operations = reader.finish().operations
    assert (len(operations), operations.skipped) == (105_000, 0)
    assert sum(operations.duration_us) == 1500 * 1_000_000 + 103_500 * 2
    assert operations.inode[104_999] == (104_999 if 104_999 % 70 else 1)
    assert max(map(len, (reader._numbers, reader._seconds))) <= 100_002
    assert len(reader._seconds) <= 3602


def test_more_kinds_than_any_client_has_are_skipped():
    many = [FSYNC.replace(b"fsync", b"odd%d" % number) for number in range(300)]
    failing = [FSYNC.replace(b"OK", b"failed so %d times" % number) for number in range(300)]
    operations = read_blocks([*many, *failing, READ, WRITE]).operations
    assert len(operations) + operations.skipped == 602
    assert row(operations, len(operations) - 1)["name"] == "write"


def test_a_renamed_folder_takes_its_files_along():
    front = b"2026.11.21 08:56:01.000000 [uid:0,gid:0,pid:1] "
    entry = b",[-rw-r--r--:0100644,1,0,0,1,1,1,0]) - OK <0.000001>\n"
    log = front + b"mkdir (1,a,?rwxr-xr-x:00755): (5" + entry
    log += front + b"create (5,x,y,-rw-r--r--:0100644): (6" + entry
    log += front + b"rename (1,a,1,b,0) - OK <0.000001>\n"
    log += front + b"rename (5,x,y,1,gone,0) - no such file or directory <0.000001>\n"
    assert read_blocks([log]).operations.paths == {1: "/", 5: "b", 6: "b/x,y"}


@pytest.fixture
def packed():
    random.seed(7)
    log = b"".join(WRITE.replace(b"000102", b"%06d" % random.randrange(10**6)) for _ in range(5000))
    return gzip.compress(log, 1)


def test_gzip_cut_off_is_read_as_far_as_it_goes(packed, tmp_path):
    path = tmp_path / "log.gz"
    path.write_bytes(packed)
    whole = read_trace(str(path))
    assert (len(whole.operations), whole.truncated) == (5000, None)
    path.write_bytes(packed[: len(packed) // 2])
    half = read_trace(str(path))
    assert half.truncated == "cut off"
    assert 2000 < len(half.operations) < 3000
    path.write_bytes(packed[: len(packed) // 2] + b"\xff" * 100 + packed[len(packed) // 2 :])
    damaged = read_trace(str(path))
    assert damaged.truncated == "damaged"
    assert len(damaged.operations) > 1000


def test_several_gzips_in_one_file(packed, tmp_path):
    (tmp_path / "log.gz").write_bytes(packed + packed)
    assert len(read_trace(str(tmp_path / "log.gz")).operations) == 10_000


def test_what_is_no_log_is_refused(tmp_path):
    with pytest.raises(NotFoundError):
        read_trace(str(tmp_path / "none"))
    (tmp_path / "text").write_text("hello\nworld\n")
    with pytest.raises(SnapmgrError, match="none of its 2 lines"):
        read_trace(str(tmp_path / "text"))
