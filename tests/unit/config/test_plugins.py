"""Backends are found as installed distributions; a broken one is named and hides no other."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.metadata import entry_points
from textwrap import dedent

import pytest

from snapmgr.api import API_VERSION, Backend
from snapmgr.config import plugins
from snapmgr.config.plugins import _contract, _points, list_plugins, load_backend, make_backend
from snapmgr.contract.errors import ConfigError, MissingRequirementError, SnapmgrError

GOOD = """
    from dataclasses import dataclass

    @dataclass(frozen=True, kw_only=True)
    class Config:
        folder: str = ".snapshots"
        count: int = 3

        def __post_init__(self):
            if self.count > 100:
                raise ValueError("count is at most 100")

    class Good:
        name = "NAME"
        api_version = VERSION
        Config = Config

        def __init__(self, config, runner, mounter):
            self.config, self.runner, self.mounter = config, runner, mounter

        METHODS = None
"""


METHODS = {name for name in vars(Backend) if not name.startswith("_") and callable(vars(Backend)[name])}


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that installs a distribution with one backend and returns its module's name."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name, source, *, distribution=None, version="1.2", attribute="Good", module=None):
        distribution = distribution or f"dist-{name}"
        module = module or f"plugin_{name}_{tmp_path.name}".replace("-", "_")
        monkeypatch.delitem(sys.modules, module, raising=False)
        text = (
            dedent(source)
            .replace("METHODS", " = ".join(sorted(METHODS)))
            .replace("NAME", name)
            .replace("VERSION", str(API_VERSION))
        )
        (tmp_path / f"{module}.py").write_text(text)
        info = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[snapmgr.backends]\n{name} = {module}:{attribute}\n")
        # Within a tick of the clock the folder's time does not change.
        plugins._points_in.cache_clear()
        return module

    yield install
    for module in [module for module in sys.modules if module.endswith(tmp_path.name.replace("-", "_"))]:
        del sys.modules[module]


def _usable():
    return {plugin.name: plugin.backend for plugin in list_plugins() if plugin.backend is not None}


def test_an_installed_backend_is_found_by_its_name(install):
    install("good", GOOD)
    assert load_backend("good").name == "good"
    assert _usable()["good"] is load_backend("good")
    plugin = next(plugin for plugin in list_plugins() if plugin.name == "good")
    assert (plugin.distribution, plugin.error) == ("dist-good 1.2", None)


def test_one_backend_is_loaded_without_importing_the_others(install):
    install("good", GOOD)
    bomb = install("bomb", "raise SystemError('imported')")
    load_backend("good")
    assert bomb not in sys.modules


@pytest.mark.parametrize(
    ("source", "said", "kind"),
    [
        ("raise RuntimeError('boom')", "cannot be imported: RuntimeError: boom", SnapmgrError),
        ("import no_such_module_anywhere", "No module named 'no_such_module_anywhere'", MissingRequirementError),
        ("def broken(:", "cannot be imported: SyntaxError", SnapmgrError),
        ("Other = 1", "cannot be imported: AttributeError", SnapmgrError),
        ("Good = 3", "is not a class but 3", SnapmgrError),
        ("class Good:\n  pass", "does not define Config, annotate, api_version, arm, attach", SnapmgrError),
        (GOOD.replace("VERSION", "99"), "is written for version 99 of the backend interface", SnapmgrError),
        (GOOD.replace("VERSION", "'x'"), "is written for version x of the backend interface", SnapmgrError),
        (GOOD.replace('"NAME"', '"other"'), "calls itself 'other'", SnapmgrError),
        (GOOD + "\n    del Good.annotate, Good.usage", "does not define annotate, usage", SnapmgrError),
    ],
)
def test_a_broken_backend_names_its_distribution_and_hides_no_other(install, source, said, kind):
    install("broken", source)
    install("good", GOOD)
    with pytest.raises(SnapmgrError) as caught:
        load_backend("broken")
    assert type(caught.value) is kind
    assert said in caught.value.message
    assert "the backend broken (of dist-broken 1.2)" in caught.value.message
    assert caught.value.hint
    assert "good" in _usable()
    assert "broken" not in _usable()
    listed = {plugin.name: plugin.error for plugin in list_plugins()}
    assert listed["good"] is None
    assert said in listed["broken"].message


def test_a_plugin_that_says_itself_what_is_lacking_is_believed(install):
    install(
        "broken",
        "from snapmgr.api import MissingRequirementError as E\nraise E('no zfs', hint='apt-get install zfs')",
    )
    with pytest.raises(MissingRequirementError, match=r"^no zfs$"):
        load_backend("broken")


def test_who_must_upgrade_depends_on_who_is_older(install):
    install("newer", GOOD.replace("VERSION", str(API_VERSION + 1)))
    install("older", GOOD.replace("VERSION", str(API_VERSION - 1)))
    listed = {plugin.name: plugin.error for plugin in list_plugins()}
    assert listed["newer"].hint == "upgrade snapmgr"
    assert listed["older"].hint == "upgrade dist-older"


def test_two_distributions_with_one_name_are_refused(install):
    install("good", GOOD, distribution="first")
    install("good", GOOD, distribution="second", module="another_module")
    with pytest.raises(SnapmgrError, match=r"comes from both (first|second) 1\.2 and (first|second) 1\.2"):
        load_backend("good")


def test_the_word_auto_is_no_backends_name(install):
    install("auto", GOOD)
    with pytest.raises(SnapmgrError, match="is reserved in the configuration"):
        load_backend("auto")


def test_an_unknown_backend_names_those_that_there_are(install):
    install("good", GOOD)
    with pytest.raises(ConfigError) as caught:
        load_backend("goood")
    assert "'goood'" in caught.value.message
    assert "good" in caught.value.hint


def test_a_backend_is_constructed_with_its_typed_table(install):
    install("good", GOOD)
    backend = make_backend("good", {"count": 7}, "runner", "mounter")
    assert (backend.config.folder, backend.config.count) == (".snapshots", 7)
    assert (backend.runner, backend.mounter) == ("runner", "mounter")


STRUCT = GOOD.replace("@dataclass(frozen=True, kw_only=True)", "import msgspec").replace(
    "class Config:", "class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):"
)


def test_of_a_word_that_is_no_choice_the_choices_are_named(install):
    choice = 'kind: __import__("typing").Literal["a", "b"] = "a"'
    install("good", GOOD.replace("count: int = 3", f"count: int = 3; {choice}"))
    with pytest.raises(ConfigError, match=r'^backend\.good\.kind: allowed are "a", "b"$'):
        make_backend("good", {"kind": "c"}, None, None)


@pytest.mark.parametrize("source", [GOOD, STRUCT])
@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"cuont": 1}, "backend.good.cuont: unknown key; did you mean 'count'?"),
        ({"zzz": 1}, "backend.good.zzz: unknown key; allowed are count, folder"),
        ({"count": "1"}, "backend.good.count: must be a whole number, got a text"),
        ({"count": 1.0}, "backend.good.count: must be a whole number"),
        ({"count": 101}, "backend.good: count is at most 100"),
        ({"folder": [], "zzz": 1}, "backend.good.folder: must be a text, got a list"),
    ],
)
def test_a_wrong_table_names_the_keys_path(install, source, table, said):
    install("good", source)
    with pytest.raises(ConfigError) as caught:
        make_backend("good", table, None, None)
    assert said in caught.value.message
    assert "[backend.good]" in caught.value.hint
    if "zzz" in table:
        assert "backend.good.zzz: unknown key" in caught.value.message


def test_a_config_that_is_no_record_is_the_plugins_fault(install):
    install("good", GOOD.replace("Config = Config", "Config = int"))
    with pytest.raises(SnapmgrError, match="neither a dataclass nor"):
        make_backend("good", {}, None, None)


def test_our_own_backends_come_by_the_same_way():
    plugins = {plugin.name: plugin for plugin in list_plugins()}
    assert {"btrfs", "reflink"} <= set(plugins)
    assert all(plugins[name].distribution.startswith("snapmgr ") for name in ("btrfs", "reflink"))
    assert _usable()["reflink"].Config is not None


def test_the_contract_that_is_checked_is_the_one_in_api():
    assert {"missing", "locate", "arm", "inventory", "attach", "detach", "delete", "usage"} <= METHODS
    assert set(_contract()) == METHODS | {"name", "api_version", "Config"}


def test_naming_the_backends_imports_none_of_them():
    code = (
        "import sys, snapmgr.config.plugins as p; print(*p.backend_names()); "
        "print(*sorted({name.partition('.')[0] for name in sys.modules if name.startswith('snapmgr_')} | "
        "{'importlib.metadata', 'pyudev'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "btrfs juicefs lvm reflink\n\n"


def test_an_entry_point_is_read_as_importlib_metadata_reads_it(install, tmp_path, monkeypatch):
    module = install("good", GOOD, distribution="Some.Dist")
    (info,) = tmp_path.glob("*.dist-info")
    others = "# a comment\n\n[console_scripts]\ngood = elsewhere:main\n\n"
    (info / "entry_points.txt").write_text(f"{others}[snapmgr.backends]\ngood={module} : Good\n[x]\na = b\n")
    (point,) = entry_points(group="snapmgr.backends", name="good")
    (own,) = _points()["good"]
    assert (own.name, own.value) == (point.name, point.value)
    assert own.distribution == "Some.Dist 1.2"
    assert load_backend("good").name == "good"
    # An older version behind it on the path is not imported, so its entry points do not count.
    older = tmp_path / "older"
    shutil.copytree(info, older / "some_dist-1.1.dist-info")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(older)])
    assert [one.distribution for one in _points()["good"]] == ["Some.Dist 1.2"]
    assert len(entry_points(group="snapmgr.backends", name="good")) == 1


def test_a_second_use_looks_for_no_packages_again_until_one_is_installed(install, tmp_path, monkeypatch):
    install("good", GOOD)
    assert "good" in plugins.backend_names()
    looked = []
    monkeypatch.setattr(plugins, "_add_points", lambda _found, info: looked.append(info))
    assert load_backend("good").name == "good"
    assert looked == []
    (tmp_path / "new-1.0.dist-info").mkdir()
    os.utime(tmp_path, ns=(0, 0))
    assert "good" not in plugins.backend_names()
    assert str(tmp_path / "new-1.0.dist-info") in looked


def test_the_names_of_packages_are_read_for_errors_and_lists_alone(install, monkeypatch):
    install("good", GOOD)
    monkeypatch.setattr(plugins._Point, "distribution", property(lambda _self: pytest.fail("METADATA was read")))
    assert load_backend("good").name == "good"
    assert "good" in plugins.backend_names()
