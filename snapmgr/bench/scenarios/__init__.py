"""Holds the experiments: each module here has an instance called `scenario`.

`scenarios` and `chosen` return them; other packages import nothing else from here.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from snapmgr.contract.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.bench.model import Scenario

# The order in which they are listed and run, the most important first. Others follow by name.
_FIRST = ("random-update", "snapshot-ops", "blog", "innodb-io", "aging", "oltp", "prepare")


@cache
def scenarios() -> tuple[Scenario, ...]:
    """Import and return all scenarios."""
    found = []
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        scenario: Scenario | None = getattr(import_module(module.name), "scenario", None)
        if scenario is not None:
            found.append(scenario)
    return tuple(sorted(found, key=_rank))


def _rank(scenario: Scenario) -> tuple[int, str]:
    return _FIRST.index(scenario.name) if scenario.name in _FIRST else len(_FIRST), scenario.name


def chosen(names: Sequence[str]) -> tuple[Scenario, ...]:
    """Return the scenarios of these names, each once and in list order. Raises ConfigError for other names."""
    known = {scenario.name: scenario for scenario in scenarios()}
    for name in names:
        if name not in known:
            raise ConfigError(f"unknown scenario {name!r}", hint=f"there are: {', '.join(known)}")
    return tuple(scenario for name, scenario in known.items() if name in names)
