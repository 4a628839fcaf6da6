"""What holds for each scenario: the conductor, the report and the command line rely on it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

import snapmgr.bench.scenarios as package
from snapmgr.bench.model import PROFILES, Parameters
from snapmgr.bench.scenarios import chosen, scenarios
from snapmgr.bench.storage.stacks import STACKS
from snapmgr.contract.errors import ConfigError

ALL = scenarios()
# Buffered data must not fit into memory; a server's buffer pool must.
LITTLE_MEMORY, MUCH_MEMORY = 64 << 20, 1 << 40


def _parameters(scenario, profile, variant):
    given = Parameters(profile=profile, variant=variant, size_bytes=0, memory_bytes=LITTLE_MEMORY, seed=1)
    try:
        return scenario.parameters(given)
    except ConfigError:
        return scenario.parameters(replace(given, memory_bytes=MUCH_MEMORY))


def test_each_module_is_one_and_names_are_unique():
    modules = {path.stem for path in Path(package.__file__).parent.glob("*.py")} - {"__init__"}
    assert {scenario.name.replace("-", "_") for scenario in ALL} == modules
    assert len({scenario.name for scenario in ALL}) == len(ALL)


def test_what_everybody_wants_to_know_comes_first():
    assert [scenario.name for scenario in ALL][:2] == ["random-update", "snapshot-ops"]


def test_scenarios_are_chosen_by_name_once_and_in_their_order():
    assert [one.name for one in chosen(["snapshot-ops", "random-update", "snapshot-ops"])] == [
        "random-update",
        "snapshot-ops",
    ]
    with pytest.raises(ConfigError, match="unknown scenario 'random'") as error:
        chosen(["random"])
    assert "random-update" in (error.value.hint or "")


@pytest.mark.parametrize("scenario", ALL, ids=lambda scenario: scenario.name)
def test_figures_are_told_apart_and_some_are_compared(scenario):
    names = [info.name for info in scenario.metrics]
    assert len(set(names)) == len(names)
    assert any(info.headline for info in scenario.metrics)
    assert all(info.title and info.better in {"less", "more", "neither"} for info in scenario.metrics)
    assert {info.unit for info in scenario.metrics} <= {"s", "B", "B/s", "1/s", ""}


@pytest.mark.parametrize("scenario", ALL, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("profile", PROFILES)
def test_each_profile_has_a_size_time_and_parameters_that_can_be_written(scenario, profile):
    for variant in scenario.variants or ("",):
        parameters = _parameters(scenario, profile, variant)
        assert parameters.variant == variant
        assert json.loads(json.dumps(asdict(parameters)))["profile"] == profile
        # Completing what is complete changes nothing: a resumed run gets the same.
        assert scenario.parameters(parameters) == parameters
        needs = scenario.needs(parameters)
        assert needs.space_bytes > 0
        assert needs.seconds > 0


@pytest.mark.parametrize("scenario", ALL, ids=lambda scenario: scenario.name)
def test_each_scenario_suits_some_stack_and_says_why_not_another(scenario):
    answers = [scenario.suits(stack) for stack in STACKS.values()]
    assert None in answers
    assert all(answer is None or answer.strip() for answer in answers)
