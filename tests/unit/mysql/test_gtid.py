"""GTID sets against a naive model (a plain set of single transactions), and GTID positions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.mysql.binlog.gtid import LAST_NUMBER, GtidError, MariadbGtid, MariadbGtidPosition, MysqlGtidSet

A, B = "0000000a-0000-0000-0000-00000000000a", "ffffffff-0000-0000-0000-00000000000b"

keys = st.tuples(st.sampled_from([A, B]), st.sampled_from(["", "a", "b_1"]))
singles = st.sets(st.tuples(keys, st.integers(1, 30)), max_size=40)
ranges = st.lists(st.tuples(keys, st.integers(1, 30), st.integers(0, 30)), max_size=20)


def of(model):
    gtids = MysqlGtidSet()
    for (uuid, tag), number in model:
        gtids.add(uuid, number, tag=tag)
    return gtids


def members(gtids):
    return {((uuid, tag), n) for uuid, tag, first, last in gtids.ranges() for n in range(first, last + 1)}


@given(ranges)
def test_adding_ranges_is_adding_each_number(added):
    gtids, model = MysqlGtidSet(), set()
    for (uuid, tag), first, last in added:
        gtids.add(uuid, first, last, tag=tag)
        model |= {((uuid, tag), n) for n in range(first, last + 1)}
    assert members(gtids) == model
    assert gtids == of(model)


@given(singles, singles)
def test_sets_do_what_plain_sets_do(one, other):
    assert members(of(one) | of(other)) == one | other
    assert (of(one) == of(other)) == (one == other)


@given(singles)
def test_what_is_printed_is_read_again_and_normal(model):
    text = str(of(model))
    assert MysqlGtidSet.parse(text) == of(model)
    # Neither overlapping nor touching, and sorted: there is but one text for a set.
    assert str(MysqlGtidSet.parse(",".join(reversed(text.split(","))))) == text


@given(singles, st.data())
def test_an_operation_leaves_its_operands_alone(model, data):
    gtids, other = of(model), of(data.draw(singles))
    before = str(gtids), str(other)
    _ = gtids | other, gtids.copy().add(A, 99)
    assert (str(gtids), str(other)) == before


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("", ""),
        (" , ,", ""),
        (f"{A}:1-3:4:6", f"{A}:1-4:6"),
        (f"{A.upper()}:7-6:2", f"{A}:2"),
        (f"{A.replace('-', '')}:1", f"{A}:1"),
        (f"{B}:1,\n{A}:5", f"{A}:5,{B}:1"),
        (f"{A}:B:1-2:a:3:1:7,{A}:9", f"{A}:9:a:1:3:7:b:1-2"),
        (f"{A}: 1 - 2 : tag : 3", f"{A}:1-2:tag:3"),
        (f"{A}:{LAST_NUMBER}", f"{A}:{LAST_NUMBER}"),
    ],
)
def test_texts_as_servers_take_them(text, normal):
    assert str(MysqlGtidSet.parse(text)) == normal


@pytest.mark.parametrize(
    "text",
    [
        A,
        "x:1",
        f"{A}:0",
        f"{A}:-1",
        f"{A}:1-",
        f"{A}:{LAST_NUMBER + 1}",
        f"{A}:tag",
        f"{A}:tag:tag:1",
        f"{A}:1tag:1",
        f"{A}:{'t' * 33}:1",
        f"{A}:१",
        "0-1-2",
        f"{A}:" + "9" * 10000,
    ],
)
def test_what_is_no_gtid_set_is_refused(text):
    with pytest.raises(GtidError) as caught:
        MysqlGtidSet.parse(text)
    assert len(caught.value.message) < 300


gtid = st.builds(MariadbGtid, st.integers(0, 3), st.integers(1, 2), st.integers(1, 9))


@given(st.lists(gtid))
def test_a_position_is_the_last_gtid_of_each_domain(written):
    position = MariadbGtidPosition()
    for one in written:
        position.advance(one)
    assert list(position) == [
        [one for one in written if one.domain == domain][-1] for domain in sorted({one.domain for one in written})
    ]


def test_domains_are_in_the_order_of_their_numbers():
    position = MariadbGtidPosition()
    for one in (MariadbGtid(10, 1, 1), MariadbGtid(9, 2, 2), MariadbGtid(0, 1, 18446744073709551615)):
        position.advance(one)
    assert str(position) == "0-1-18446744073709551615,9-2-2,10-1-1"
