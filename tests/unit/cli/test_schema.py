"""The published schema of the documents."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
import pytest

from snapmgr.cli.main import COMMANDS, cli, main
from snapmgr.cli.schema import KEYS, blank, schema, text
from support.documents import conforms

if TYPE_CHECKING:
    from collections.abc import Iterator

REFERENCE = Path(__file__).parents[3] / "docs" / "reference"


def _commands(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    for inner in getattr(command, "commands", {}).values():
        yield from _commands(f"{name} {inner.name}", inner)


def test_the_published_schema_is_current() -> None:
    """Otherwise: .venv/bin/python -m snapmgr.cli.schema > docs/reference/json.schema.json."""
    assert (REFERENCE / "json.schema.json").read_text() == text()


def test_each_command_with_json_has_a_document_and_no_other() -> None:
    assert isinstance(cli, click.Group)
    found = {
        name
        for top in COMMANDS
        for name, command in _commands(top, import_module(f"snapmgr.cli.{top}").command)
        if any("--json" in parameter.opts for parameter in command.params)
    }
    assert found == set(KEYS)


def test_each_key_is_required_and_is_explained() -> None:
    explained = set(re.findall(r"`([a-z_0-9]+)`", (REFERENCE / "json.md").read_text()))
    for name, part in schema()["$defs"].items():
        keys = part["properties"].keys()
        optional = {"snapshot", "pruned", "plan"} if name == "BackupJob" else set()
        assert set(part["required"]) == keys - optional, name
        assert keys <= explained, (name, keys - explained)


@pytest.mark.parametrize("command", KEYS)
def test_a_document_of_a_command_that_failed_conforms(command: str) -> None:
    document: dict[str, Any] = {"schema_version": 1, "command": command, "exit_code": 1, "error": None}
    conforms(document | blank(command))
    with pytest.raises((msgspec.ValidationError, AssertionError)):
        conforms(document | blank(command) | {"error": "text"})


@pytest.mark.parametrize("command", KEYS)
def test_each_command_fails_with_a_whole_document(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    config.write_text("no TOML")
    names = ("show", "mount", "umount", "verify", "prepare", "clone", "pin", "unpin", "delete")
    words = {
        "restore": ["latest", str(tmp_path / "new")],
        "trace record": ["/nowhere", "--", "true"],
        "trace show": ["/nowhere"],
        "trace compare": ["/nowhere", "/nowhere"],
        "bench show": ["/nowhere"],
        "bench compare": ["/nowhere", "/nowhere"],
        "schedule install": ["nightly", "--on", "daily"],
        "schedule remove": ["nightly"],
        "bench list": ["--wrong"],
        "bench run": ["--on", "/nowhere"],
        "bench advise": ["--for", "oltp", "/nowhere"],
        **{name: ["latest"] for name in names},
    }.get(command, [])
    code = main(["--config", str(config), *command.split(), "--json", *words])
    said = capsys.readouterr()
    if said.out:
        document = msgspec.json.decode(said.out)
        conforms(document)
        assert document["exit_code"] == code
    else:
        assert code == 2
