"""``snapmgr bench list``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from snapmgr.cli.output import format_table, print_lines
from snapmgr.cli.params import json_option
from snapmgr.contract.errors import EXIT_OK
from snapmgr.contract.units import format_duration, format_size

if TYPE_CHECKING:
    from snapmgr.bench.model import ProfileName, Scenario
    from snapmgr.cli.session import Session

# No target is given, so no profile runs out of room.
_ROOM_BYTES = 1 << 60


@click.command(
    "list",
    epilog="""\b
Example:
  snapmgr bench list
""",
)
@json_option
@click.pass_obj
def list_(session: Session) -> int:
    """List scenarios and storages, and their missing requirements.

    Time and space are for one sample on a disk of 100 MB/s and 1,000 IOPS; a run takes several per storage.
    """
    from snapmgr.bench.scenarios import scenarios
    from snapmgr.bench.storage.contributed import all_stacks
    from snapmgr.bench.storage.stacks import missing_requirements

    found = [_scenario(scenario) for scenario in scenarios()]
    stacks: list[dict[str, Any]] = [
        {
            "name": stack.name,
            "title": stack.title,
            "missing": [{"what": reason.what, "hint": reason.hint} for reason in missing_requirements(stack)],
        }
        for stack in all_stacks().values()
    ]
    if session.json:
        session.document(EXIT_OK, scenarios=found, stacks=stacks)
        return EXIT_OK
    lines = []
    for one in found:
        lines += [f"{one['name']}: {one['title']}"]
        lines += [f"  variants: {', '.join(one['variants'])}"] if one["variants"] else []
        lines += [f"  {_profile(name, facts)}" for name, facts in one["profiles"].items()]
        lines += [f"  missing: {reason['what']} ({reason['hint']})" for reason in one["missing"]]
        lines.append("")
    rows = [
        [one["name"], one["title"], "; ".join(reason["what"] for reason in one["missing"]) or "nothing"]
        for one in stacks
    ]
    print_lines([*lines, *format_table(("STACK", "STORAGE", "MISSING HERE"), rows)])
    return EXIT_OK


def _profile(name: str, facts: dict[str, Any]) -> str:
    if "refused" in facts:
        return f"{name}: {facts['refused']}"
    return f"{name}: {format_size(facts['space_bytes'])}, {format_duration(facts['seconds'])} a sample"


def _scenario(scenario: Scenario) -> dict[str, Any]:
    from snapmgr.bench.model import PROFILES

    return {
        "name": scenario.name,
        "title": scenario.title,
        "variants": list(scenario.variants),
        "missing": [{"what": reason.what, "hint": reason.hint} for reason in scenario.missing()],
        "profiles": {profile: _needs(scenario, profile) for profile in PROFILES},
    }


def _needs(scenario: Scenario, profile: ProfileName) -> dict[str, Any]:
    from snapmgr.bench.measure.memory import memory_bytes
    from snapmgr.bench.run.plan import Options, sized
    from snapmgr.contract.errors import ConfigError

    try:
        parameters, needs = sized(
            scenario, Options(profile=profile), memory_bytes=memory_bytes(), room_bytes=_ROOM_BYTES
        )
    except ConfigError as error:
        return {"refused": error.message}
    return {
        "data_bytes": parameters.size_bytes,
        "space_bytes": needs.space_bytes,
        "seconds": needs.seconds,
    }
