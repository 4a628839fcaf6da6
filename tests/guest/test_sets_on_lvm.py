"""A loaded MariaDB with its data on one logical volume and its redo log on another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from snapmgr.access.attach import attached, copies, data_path
from support.exactness import check_copy
from support.lvmscene import lvm_scene, take_by_command

if TYPE_CHECKING:
    from snapmgr.catalog.manifest import Lease, Manifest

pytestmark = pytest.mark.needs("root", "mariadbd")
SETS = 2


def test_data_and_redo_log_on_two_volumes_are_one_instant_while_the_server_is_frozen(vg):
    with lvm_scene(vg, "thin", "xfs", redo=("classic", "ext4")) as scene:
        refused = scene.run("backup", "demo")
        assert refused.returncode == 4, refused.stderr
        redo = str(scene.redo)
        assert f"at {redo}" in refused.stderr
        assert "freeze-process" in refused.stderr
        assert scene.stored() == []

        scene.configure('quiesce = "freeze-process"')
        taken = take_by_command(scene, SETS)

        def options(lease: Lease, manifest: Manifest) -> tuple[str, ...]:
            copy = copies(lease, manifest)[redo]
            return (f"--innodb-log-group-home-dir={copy}", f"--innodb-undo-directory={copy}")

        ctx = scene.context()
        for one in taken:
            quiesce = one.manifest.quiesce
            assert quiesce is not None
            assert 0 < quiesce.frozen_s <= quiesce.held_s
            with attached(ctx, ctx.catalog.load(one.manifest.id)) as lease:
                check_copy(data_path(lease), one, scene.server.kind, options(lease, one.manifest))
        done = scene.run("verify", taken[0].manifest.id)
        assert done.returncode == 0, done.stderr
        assert scene.run("delete", "--force", "--yes", taken[0].manifest.id, taken[1].manifest.id).returncode == 0
        assert scene.stored() == []
