"""The reader of binary logs on recorded logs of real servers, truncated and damaged in every way."""

from __future__ import annotations

import io
import json
import tracemalloc
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.mysql.binlog.events import (
    CHECKSUM_CRC32,
    FormatDescription,
    GtidList,
    MariadbTransaction,
    MysqlTransaction,
    PreviousGtids,
    Query,
    Xid,
)
from snapmgr.mysql.binlog.reader import BinlogError, EncryptedBinlogError, TruncatedBinlogError, open_binlog
from snapmgr.mysql.binlog.tail import tail
from support.binlogs import made_event, shown_once

RECORDED = Path(__file__).parents[2] / "golden/binlog"
NAMES = ("mariadb-10.11", "mariadb-11.8", "mysql-9")
ROWS, XID, MARIADB_GTID = 30, 16, 162
_DECODED = {
    "Format_desc": FormatDescription,
    "Gtid_list": GtidList,
    "Previous_gtids": PreviousGtids,
    "Query": Query,
    "Xid": Xid,
    "Gtid_tagged_log_event": MysqlTransaction,
}

each_recording = pytest.mark.parametrize("name", NAMES)


class Recording(NamedTuple):
    data: bytes
    positions: list[tuple[int, str]]
    events: list[tuple[int, str, int, int, str]]

    @property
    def beginning(self) -> int:
        """The end of the event that tells the GTIDs of earlier files."""
        return self.events[1][3]

    def expected(self, size: int) -> tuple[int, str] | None:
        """What the server said last of what is within the first `size` bytes."""
        if size < self.beginning:
            return None
        offset, gtid = [said for said in self.positions if said[0] <= size or said == self.positions[0]][-1]
        # Nobody waits for a Binlog_checkpoint: it may have been written after the question.
        written = [stop for _, kind, _, stop, _ in self.events if kind == "Binlog_checkpoint" and stop <= size]
        return max([offset if offset <= size else self.beginning, *written]), gtid


@cache
def recorded(name: str) -> Recording:
    told = json.loads((RECORDED / f"{name}.json").read_text())
    data = (RECORDED / f"{name}.000002").read_bytes()
    return Recording(data, [tuple(said) for said in told["positions"]], shown_once(told["events"], len(data)))


def found(data: bytes) -> tuple[int, str] | None:
    position = tail(io.BytesIO(data)).position
    return position and (position.offset, position.gtid)


@each_recording
def test_every_event_is_where_the_server_shows_it(name):
    recording = recorded(name)
    with open_binlog(io.BytesIO(recording.data)) as reader:
        read = list(reader.events())
        reader.verify(read[1].offset, read[-1].next_offset)
    assert [(event.offset, event.server_id, event.next_offset) for event in read] == [
        (offset, server_id, stop) for offset, _, server_id, stop, _ in recording.events
    ]
    for event, (_, kind, _, _, text) in zip(read, recording.events, strict=True):
        if kind in _DECODED:
            assert isinstance(event.body, _DECODED[kind])
        match event.body:
            case Xid(xid=xid):
                assert f"xid={xid} " in text
            case MariadbTransaction(gtid=gtid):
                assert text.endswith(f"GTID {gtid}")
            case MysqlTransaction(uuid=uuid, tag=tag, number=number):
                assert f"'{':'.join(filter(None, (uuid, tag, str(number))))}'" in text
            case PreviousGtids(gtids=gtids):
                assert str(gtids) == text
            case FormatDescription(server_version=version, checksum=checksum, in_use=in_use):
                assert f"Server ver: {version}," in text
                assert (checksum, in_use) == (CHECKSUM_CRC32, True)


@each_recording
def test_cut_off_at_every_byte_the_position_is_the_one_before(name):
    recording = recorded(name)
    for size in range(len(recording.data) + 1):
        expected = recording.expected(size)
        end = tail(io.BytesIO(recording.data[:size]))
        assert (end.position and (end.position.offset, end.position.gtid)) == expected, size
        assert end.truncated == (size != expected[0] if expected else size not in {4, recording.events[0][3]}), size


@each_recording
def test_cut_off_at_every_byte_the_events_before_are_read(name):
    recording = recorded(name)
    ends = [stop for *_, stop, _ in recording.events]
    for size in range(0, len(recording.data) + 1, 7):
        read = []
        try:
            with open_binlog(io.BytesIO(recording.data[:size])) as reader:
                read.extend(event.next_offset for event in reader.events())
        except TruncatedBinlogError as error:
            assert error.offset == ([0 if size < 4 else 4, *read])[-1]  # noqa: PT017
        else:
            assert size in {4, *ends}
        assert read == [stop for stop in ends if stop <= size]


@each_recording
@given(st.data())
def test_a_damaged_byte_is_an_error_or_does_no_harm(name, data):
    recording = recorded(name)
    place = data.draw(st.integers(0, len(recording.data) - 1))
    damaged = bytearray(recording.data)
    damaged[place] ^= data.draw(st.integers(1, 255))
    try:
        result = found(bytes(damaged))
    except BinlogError:
        return
    # The flag "in use" is in no checksum.
    assert place == 4 + 17
    assert result == recording.positions[-1]


@each_recording
@given(st.data())
def test_damage_in_the_middle_is_not_taken_for_the_end(name, data):
    # The lengths above all: an event that seems to reach beyond the end is not yet a partial one.
    recording = recorded(name)
    offset, *_ = data.draw(st.sampled_from(recording.events[2:]))
    damaged = bytearray(recording.data)
    damaged[offset + 9 : offset + 13] = data.draw(st.integers(0, 0xFFFFFFFF)).to_bytes(4, "little")
    if damaged == recording.data:
        return
    with pytest.raises(BinlogError) as caught:
        found(bytes(damaged))
    assert caught.value.offset == offset
    assert f"at {offset}" in caught.value.message


@given(st.binary(max_size=300), st.sampled_from(["", *NAMES]), st.integers(0, 600))
def test_whatever_comes_is_an_error_or_a_position(garbage, name, kept):
    beginning = recorded(name).data[: max(kept, 4)] if name else b"\xfebin"
    for data in (beginning + garbage, garbage):
        try:
            result = found(data)
        except BinlogError:
            continue
        assert result is None or (name and result[0] <= len(data))


@each_recording
@pytest.mark.parametrize("zeros", [1, 18, 19, 23, 4096, 3 << 20])
def test_zeros_at_the_end_are_what_a_power_cut_leaves(name, zeros):
    recording = recorded(name)
    end = tail(io.BytesIO(recording.data + bytes(zeros)))
    assert end.truncated
    assert end.position is not None
    assert (end.position.offset, end.position.gtid) == recording.positions[-1]


def test_zeros_before_something_else_are_damage():
    with pytest.raises(BinlogError, match="at 3005") as caught:
        found(recorded("mysql-9").data + bytes(100) + b"x")
    assert not isinstance(caught.value, TruncatedBinlogError)


@each_recording
def test_a_closed_file_is_told_from_one_in_use(name):
    data = bytearray(recorded(name).data)
    assert tail(io.BytesIO(data)).in_use
    data[4 + 17] = 0
    end = tail(io.BytesIO(data))
    assert not end.in_use
    assert end.flavor == name.split("-", maxsplit=1)[0]
    assert end.server_version.startswith(name.split("-")[1])


@pytest.mark.parametrize(
    ("name", "option", "offset"), [("mariadb-10.11", "encrypt_binlog", 256), ("mysql-9", "binlog_encryption", None)]
)
def test_encrypted_files_are_named_as_such(name, option, offset):
    with pytest.raises(EncryptedBinlogError, match=f"encrypted \\({option}\\)") as caught:
        tail(RECORDED / f"{name}-encrypted.000001")
    assert caught.value.offset == offset
    assert caught.value.hint is not None
    assert "under a lock" in caught.value.hint


@pytest.mark.parametrize("data", [b"x", b"bin", b"\xfebix", b"MariaDB", bytes(3) + b"x"])
def test_what_is_no_binary_log_is_refused(data):
    with pytest.raises(BinlogError, match="not a binary log"):
        found(data)


def maria(*bodies: tuple[int, bytes]) -> bytes:
    """Return a MariaDB log: its recorded first events, then others."""
    recording = recorded("mariadb-10.11")
    data = recording.data[: recording.beginning]
    for kind, body in bodies:
        data += made_event(kind, len(data), body)
    return data


def begin(number: int, flags: int = 0) -> tuple[int, bytes]:
    return MARIADB_GTID, number.to_bytes(8, "little") + bytes(4) + flags.to_bytes(1, "little") + bytes(6)


def query(text: str) -> tuple[int, bytes]:
    return 2, bytes(8) + b"\1" + bytes(4) + b"t\0" + text.encode()


END = (XID, bytes(8))


@pytest.mark.parametrize(
    ("bodies", "what"),
    [
        ([begin(1), begin(2)], "before the previous one has ended"),
        ([begin(1), query("BEGIN")], "inside another"),
        ([begin(1), (4, bytes(8) + b"x.000003")], "inside a transaction"),
        ([begin(1), END, (163, bytes(4))], "after the file's beginning"),
        ([(163, bytes(4))], "after the file's beginning"),
        ([(15, bytes(100))], "second Format_description"),
        ([(163, b"\xff\xff\xff\x0f")], "no room for 268435455"),
        ([(XID, bytes(9))], "too long"),
        ([(XID, bytes(7))], "1 bytes too early"),
        ([(2, bytes(12))], "1 bytes too early"),
        ([(MARIADB_GTID, bytes(12))], "1 bytes too early"),
        ([(MARIADB_GTID, bytes(100_000))], "is impossible"),
        ([(35, (1 << 55).to_bytes(8, "little"))], "too early"),
        ([(35, (2 << 56).to_bytes(8, "little"))], "format 2"),
        ([(42, b"\4")], "serialization format"),
    ],
)
def test_events_that_cannot_be_are_damage(bodies, what):
    with pytest.raises(BinlogError, match=what):
        found(maria(*bodies))


@pytest.mark.parametrize(
    ("bodies", "number"),
    [
        ([begin(1), (ROWS, b"x"), END], 1),
        ([begin(1), query("SAVEPOINT s"), query("ROLLBACK TO `s`"), query("COMMIT")], 1),
        ([begin(1), query("ROLLBACK")], 1),
        ([begin(1, flags=1), (5, b"x"), (13, b"x"), (14, b"x"), query("INSERT …")], 1),
        ([begin(1, flags=1), (14, b"x")], 0),
        ([begin(1, flags=1), query("BEGIN NOT ATOMIC …")], 1),
        ([begin(1, flags=1), (165, b"compressed")], 1),
        ([begin(1), (165, b"compressed")], 0),
        ([begin(1), END, (200, b"unknown"), (161, b"x"), begin(2)], 1),
    ],
)
def test_where_a_transaction_ends(bodies, number):
    data = maria(*bodies)
    end = tail(io.BytesIO(data))
    before = recorded("mariadb-10.11").positions[0][1]
    assert end.transactions == bool(number)
    assert end.truncated == ((number == 0) or bodies[-1] == begin(2))
    assert end.position is not None
    assert end.position.gtid == (f"0-1-{number}" if number else before)


@pytest.mark.parametrize("kind", [ROWS, 2, 40])
def test_memory_is_bounded_whatever_an_event_claims(kind, tmp_path):
    # Sparse: rows of 3 GiB are skipped, not read; a statement is, for its checksum.
    size = 3 << 30 if kind == ROWS else 96 << 20
    start = maria(begin(1))
    path = tmp_path / "log.000001"
    header = made_event(kind, len(start), b"")[:9] + size.to_bytes(4, "little")
    header += (len(start) + size & 0xFFFFFFFF).to_bytes(4, "little") + bytes(2)
    with path.open("wb") as file:
        file.write(start + header)
        file.truncate(len(start) + size)
        file.seek(0, 2)
        file.write(made_event(*[XID, len(start) + size, bytes(8)]))
    tracemalloc.start()
    try:
        if kind == ROWS:
            end = tail(path)
            assert end.position is not None
            assert end.position.gtid == "0-1-1"
            assert end.position.offset == path.stat().st_size
        else:
            with pytest.raises(BinlogError, match="checksum"):
                tail(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_large_event_that_would_have_ended_the_last_transaction_is_verified():
    # Skipped as rows: but it is a statement whose type was damaged, and the transaction is complete.
    recording = recorded("mysql-9")
    data = recording.data[: recording.events[2][3]]
    large = bytearray(made_event(2, len(data), query("CREATE TABLE …" + "x" * 100_000)[1]))
    assert found(data + large) == (len(data + large), recording.positions[1][1])
    large[4] = ROWS
    with pytest.raises(BinlogError, match="checksum"):
        found(data + large)


def test_an_event_that_swallows_others_is_damage_though_it_does_not_say_where_it_ends():
    recording = recorded("mariadb-11.8")
    data = bytearray(recording.data)
    silent = [offset for offset, *_ in recording.events if data[offset + 13 : offset + 17] == bytes(4)]
    assert len(silent) > 5
    for offset in silent:
        damaged = bytearray(data)
        damaged[offset + 9 : offset + 13] = (len(data) - offset + 1).to_bytes(4, "little")
        with pytest.raises(BinlogError, match="there is another one") as caught:
            found(damaged)
        assert caught.value.offset == offset
        assert not isinstance(caught.value, TruncatedBinlogError)


def test_an_open_file_stays_open():
    file = io.BytesIO(recorded("mysql-9").data)
    with open_binlog(file) as reader:
        assert len(list(reader.events())) == len(recorded("mysql-9").events)
    assert not file.closed
