"""The workbench that scenarios measure on."""

from __future__ import annotations

from types import SimpleNamespace

from snapmgr.api import Provisioned
from snapmgr.bench.storage import workbench
from snapmgr.bench.storage.stacks import STACKS
from snapmgr.system.command import CommandRunner


def test_a_volume_is_located_once_so_that_no_list_contains_the_search_for_it(monkeypatch, tmp_path):
    located = []

    class Backend:
        def locate(self, target):
            located.append(target)
            return SimpleNamespace(pool="pool", subpath="")

        def inventory(self, pools):
            return pools

        def capabilities(self, _volumes):
            return SimpleNamespace(atomicity="volume")

    monkeypatch.setattr(workbench, "find_target", lambda path, runner: path)  # noqa: ARG005 - as it is called
    bench = workbench.StackWorkbench(
        STACKS["btrfs"],
        None,
        backend=Backend(),
        scene=None,
        provisioned=Provisioned(path=str(tmp_path), devices=(), capacity_bytes=1, commands=()),
        folder=tmp_path,
        runner=CommandRunner(),
        tell=print,
    )
    assert bench.at_once()
    assert bench.inventory() == bench.inventory() == ("pool",)
    assert located == [str(tmp_path)]
