"""Whatever stands on the command line: a documented exit code, no traceback, and nothing that moves the cursor."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import click
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from snapmgr.catalog.manifest import Position, encode
from snapmgr.cli.main import COMMANDS, LazyGroup, cli, main
from support.sample import lease, manifest

if TYPE_CHECKING:
    from pathlib import Path

    from snapmgr.catalog.store import Catalog

DOCUMENTED = {0, 1, 2, 3, 4, 5, 6, 7, 130}
FEW = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
# These make files: only below the working folder, and none of the machine's own.
WRITERS = {"config", "restore", "prepare", "mount", "schedule"}
# What a terminal would obey; "\n" ends our lines, and is in no name that is shown.
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2066\ud800-\udfff]")
NASTY = (
    *(
        "",
        " ",
        "-",
        "--",
        "---",
        "-h",
        "--json",
        "--all",
        "latest",
        "@latest",
        "nightly@latest",
        "nightly",
        "@",
        "/",
        ".",
    ),
    *("\x1b[2J\x1b]0;title\x07", "a\nb", "a\r", "\u202eabc", "'", '"; rm -rf /', "$(id)", "%s", "{}", "[red]x[/red]"),
    *("\udcff\udcfe", "x" * 5000, "../" * 50, "/dev/null", "/proc/self/fd/0", "٣", "1e999", "-1", "nan", "inf", "0"),
    *(manifest(0).id, manifest(0).short_id, "0", "/mnt/look", "20%", "2h", "job"),
)
# A NUL cannot be in an argument: execve(2) ends it there. Of the surrogates only those that stand for bytes can.
CHARACTER = st.characters(exclude_characters="\0", exclude_categories=("Cs",)) | st.characters(
    min_codepoint=0xDC80, max_codepoint=0xDCFF, categories=("Cs",)
)
WORD = st.sampled_from(NASTY) | st.text(CHARACTER, max_size=8)


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def _options(name: str) -> list[str]:
    group = cli
    assert isinstance(group, LazyGroup)
    command = group.get_command(click.Context(cli), name)
    assert command is not None
    commands: list[Any] = [command, *getattr(command, "commands", {}).values()]
    options = [option for one in commands for parameter in one.params for option in parameter.opts if option[0] == "-"]
    return [*options, *getattr(command, "commands", {})]


def _run(config: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = main(["--config", str(config), *arguments])
    said = capsys.readouterr()
    assert code in DOCUMENTED, arguments
    assert "Traceback" not in said.err, said.err
    assert "bug in snapmgr" not in said.err, said.err
    for text in (said.out, said.err):
        assert not CONTROL.search(text), text
    return code, said.out, said.err


@pytest.mark.usefixtures("catalog")
@pytest.mark.parametrize("name", COMMANDS)
@FEW
@given(data=st.data())
def test_any_arguments(config: Path, capsys: pytest.CaptureFixture[str], name: str, data: st.DataObject) -> None:
    words = data.draw(st.lists(st.sampled_from([*_options(name), *NASTY]) | WORD, max_size=4))
    if name in WRITERS:
        words = [word for word in words if "/" not in word]
    if name == "schedule" or data.draw(st.booleans()):
        words.append("--dry-run")
    if name == "bench":
        # Nothing is measured, whatever the words.
        words = ["run", "--dry-run", *words] if "run" in words else words
    _run(config, capsys, name, *words)


@pytest.mark.usefixtures("catalog")
@FEW
@given(words=st.lists(WORD | st.sampled_from(["--config", "-q", "-v", "--debug", "--version"]), max_size=4))
def test_any_arguments_before_the_command(config: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    if "--debug" not in words:
        _run(config, capsys, *words)


@pytest.mark.parametrize("arguments", [("list",), ("show", "latest"), ("list", "--json"), ("show", "latest", "--json")])
def test_names_in_manifests_do_not_reach_the_terminal_as_they_are(
    config: Path, catalog: Catalog, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\r\u202e\x9b31m\nsnapmgr: error: forged"
    newest = replace(
        manifest(9),
        path=f"/srv/{evil}",
        excluded=(evil,),
        reason=evil,
        position=Position(file=evil, offset=1, gtid=evil),
    )
    catalog.write(newest)
    held = lease(newest)
    catalog.write_lease(replace(held, point=f"/mnt/{evil}", user=evil))
    code, out, err = _run(config, capsys, *arguments)
    assert code == 0
    assert "\nsnapmgr: error: forged" not in out + err
    if "--json" in arguments:
        document = json.loads(out)
        shown = document.get("snapshot") or document["snapshots"][-1]
        assert shown["path"] == newest.path


def test_a_file_name_in_the_state_directory_does_not_reach_the_terminal(
    config: Path, catalog: Catalog, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = catalog.path / "snapshots" / "nightly.\x1b[2J.\udcff\n"
    folder.mkdir()
    (folder / "manifest.json").write_bytes(encode(manifest(5)))
    code, _, err = _run(config, capsys, "list")
    assert code == 1
    assert "\\x1b[2J" in err
    assert _run(config, capsys, "list", "--json")[0] == 1
