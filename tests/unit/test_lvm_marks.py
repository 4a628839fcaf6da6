"""Names and tags of what is ours on LVM, and the note that is kept in tags."""

from __future__ import annotations

import base64
import re
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapmgr.api import StorageError
from snapmgr_lvm import marks

# lvm(8): what a tag and a name may consist of.
TAG = re.compile(r"[A-Za-z0-9_+./=!:#&][A-Za-z0-9_+./=!:#&-]{0,1023}")
NAME = re.compile(r"[A-Za-z0-9_+.][A-Za-z0-9_+.-]*")
IDS = st.text("abcXYZ019._-", min_size=1, max_size=200)


@given(
    st.binary(max_size=4096) | st.binary(min_size=1, max_size=16).map(lambda part: part * (marks.NOTE_MAX_BYTES // 16))
)
def test_a_note_comes_back_from_tags_that_lvm_takes(note):
    tags = marks.note_tags(note)
    assert tags
    assert all(TAG.fullmatch(tag) for tag in tags)
    assert len(set(tags)) == len(tags)
    assert marks.read_note({"snapmgr", "other", *tags}) == note
    assert set(marks.old_note_tags(["snapmgr.id=x", *tags])) == set(tags)


@given(st.binary(min_size=3000, max_size=6000), st.data())
def test_a_note_that_lost_a_part_or_was_changed_is_none(note, data):
    tags = list(marks.note_tags(note))
    at = data.draw(st.integers(0, len(tags) - 1))
    if len(tags) > 1:
        assert marks.read_note(tags[:at] + tags[at + 1 :]) is None
    tags[at] = tags[at][:-40]
    assert marks.read_note(tags) is None


def test_a_note_that_unpacks_to_more_than_one_may_have_is_none():
    packed = base64.b64encode(zlib.compress(bytes(marks.NOTE_MAX_BYTES + 1), 9)).decode()
    assert marks.read_note([f"snapmgr.note.0.1={packed}"]) is None
    with pytest.raises(StorageError, match="too long"):
        marks.note_tags(bytes(marks.NOTE_MAX_BYTES + 1))


@given(IDS, st.integers(0, 40))
def test_names_are_ones_that_lvm_takes(snapshot_id, number):
    marks.check_snapshot_id(snapshot_id)
    name = marks.snapshot_name(snapshot_id, number)
    assert NAME.fullmatch(name)
    # With the volume group's name and "-cow" device-mapper allows 127 bytes, hyphens doubled.
    assert len(name) + name.count("-") <= 64
    assert not re.search(r"_(tdata|tmeta|rimage|rmeta|mimage|mlog|cdata|cmeta|corig|cvol|vdata|vorigin|pmspare)", name)
    assert not name.startswith(("snapshot", "pvmove"))
    assert all(TAG.fullmatch(tag) for tag in marks.snapshot_tags(snapshot_id, "u"))


@given(IDS, IDS, st.integers(0, 9), st.integers(0, 9))
def test_no_two_members_have_one_name(one, other, first, second):
    if (one, first) != (other, second):
        # "a.1" as an id and member 1 of "a" are told apart by their tags, and refused by the name that is taken.
        same = f"{one}.{first}" == f"{other}.{second}" or (first == 0 and one == f"{other}.{second}")
        same = same or (second == 0 and other == f"{one}.{first}")
        assert same or marks.snapshot_name(one, first) != marks.snapshot_name(other, second)


@pytest.mark.parametrize("bad", ["", "a b", "ä", "a/b", "x" * 201, 'a"', "a,b"])
def test_an_id_that_can_be_no_tag_is_refused(bad):
    with pytest.raises(StorageError):
        marks.check_snapshot_id(bad)
