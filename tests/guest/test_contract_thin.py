"""The contract suite over the LVM backend: thin snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from snapmgr.testing import BackendContract
from support.lvmlab import LvmLab
from support.thoroughness import CAMPAIGN

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.lvm import VolumeGroup


# What is the same code for both kinds of snapshots: TestClassic has it. And test_kill.py kills more of both.
SHARED = (
    "test_attach_what_is_gone",
    "test_attach_with_another_native_id",
    "test_config_has_defaults_is_typed_and_frozen",
    "test_constructor_touches_nothing",
    "test_delete_with_another_native_id",
    "test_foreign_target_is_refused_with_a_reason",
    "test_killed_while_armed",
    "test_killed_while_arming_and_firing",
    "test_killed_while_attaching",
    "test_killed_while_deleting",
    "test_killed_while_detaching",
    "test_locate_changes_nothing",
    "test_locate_makes_no_pool",
    "test_missing_is_empty_here",
    "test_name_and_version",
    "test_nested_mount_is_named_and_left_out",
    "test_no_pools_no_things",
    "test_notes_come_back",
    "test_origin_gone_before_arm",
    "test_past_deadline_nothing_is_begun",
    "test_same_id_again_is_refused",
    "test_settle_of_what_is_gone",
    "test_unknown_pool_is_an_error",
    "test_unreachable_pool_is_an_error",
    "test_usage_of_what_is_gone",
    "test_volume_is_the_same_each_time",
)


class TestThin(BackendContract):
    @pytest.fixture
    def lab(self, shared_vg: VolumeGroup, tmp_path: Path) -> Iterator[LvmLab]:
        lab = LvmLab(shared_vg, "thin", tmp_path / "scratch")
        yield lab
        lab.close()


for name in () if CAMPAIGN else SHARED:
    assert callable(getattr(TestThin, name))
    setattr(TestThin, name, None)
