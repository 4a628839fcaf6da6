"""Plans a run: which scenarios on which stacks, with how much data, and how long that takes. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from snapmgr.bench.model import Parameters
from snapmgr.contract.errors import ConfigError
from snapmgr.contract.units import format_duration, format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from snapmgr.bench.model import Needs, ProfileName, Scenario, Stack
    from snapmgr.contract.records import Reason

_MIB = 1 << 20
LEAST_BYTES = 16 * _MIB
"""Of data: below that a scenario measures its own start."""
LEAST_TARGET_BYTES = 1024 * _MIB
"""Of a target: below that a file system's own structures decide (XFS wants 300 MiB, btrfs mixes its groups)."""
AROUND_S = 1.0
"""What mkfs, mount and unmount take beside the scenario, before anything is measured."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How thorough a run is."""

    budget_s: float
    size_bytes: int
    """Of the data, for a scenario that has no size of its own."""
    least: int
    """Pairs before anything is said of a scenario."""
    most: int
    """Pairs at most."""
    width: float
    """Intervals are measured until they are narrower than ± this share."""
    stacks: tuple[str, ...]
    """Default stacks, except for scenarios about others; see `make_plan`."""
    scenarios: tuple[str, ...] = ()
    """Default scenarios; empty: all."""
    steady_s: float = 0.0
    """How long flash is written to at most, until it is in a steady state; 0: it is not."""


# Default share of the budget.
_STEADY_SHARE = 0.25
_FEW = ("btrfs", "xfs-reflink", "lvm+ext4", "lvm-thin+xfs", "ext4")
_MORE = ("btrfs", "btrfs-nocow", "xfs-reflink", "lvm+ext4", "lvm-thin+xfs", "ext4", "xfs")
PROFILE: Mapping[ProfileName, Profile] = {
    "smoke": Profile(budget_s=50, size_bytes=32 * _MIB, least=1, most=2, width=1.0, stacks=_FEW),
    "quick": Profile(
        # Both scenarios have their least blocks on all five storages, on the disk that `Needs` assumes.
        budget_s=500,
        size_bytes=64 * _MIB,
        least=6,
        most=8,
        width=0.25,
        scenarios=("random-update", "snapshot-ops"),
        stacks=_FEW,
    ),
    "standard": Profile(
        budget_s=4 * 3600, size_bytes=4096 * _MIB, least=6, most=40, width=0.1, stacks=_MORE, steady_s=3600
    ),
    "paper": Profile(
        budget_s=48 * 3600, size_bytes=100 * 1024 * _MIB, least=6, most=64, width=0.05, stacks=_MORE, steady_s=12 * 3600
    ),
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a run."""

    scenarios: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()
    """Empty: the profile's."""
    profile: ProfileName = "quick"
    variant: str = ""
    """Empty: each scenario's default."""
    size_bytes: int | None = None
    threads: tuple[int, ...] = ()
    """For scenarios that sweep them; empty: the profile's."""
    repeats: int | None = None
    budget_s: float | None = None
    steady_s: float | None = None
    """None: as long as the profile has it."""
    seed: int = 1


@dataclass(frozen=True, kw_only=True)
class Absent:
    """One stack that a scenario cannot be measured on here."""

    scenario: Scenario
    stack: Stack
    why: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """As far as they are known: which variant, which profile."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One scenario on some stacks, all with the same parameters."""

    scenario: Scenario
    parameters: Parameters
    stacks: tuple[Stack, ...]
    """In the requested order; the others are compared with the first one."""
    needs: Needs

    @property
    def name(self) -> str:
        """As `snapmgr.bench.statistics.findings.experiment_of` has it."""
        return f"{self.scenario.name} {self.parameters.variant}".rstrip()

    @property
    def sample_s(self) -> float:
        """About how long one sample takes, file system included."""
        return self.needs.seconds + AROUND_S


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The experiments of a run, and the ones that cannot be measured."""

    options: Options
    experiments: tuple[Experiment, ...]
    absent: tuple[Absent, ...]
    budget_s: float
    least: int
    most: int
    width: float
    steady_s: float
    """See `Profile`."""

    @property
    def space_bytes(self) -> int:
        """The space that the target needs."""
        return max((experiment.needs.space_bytes for experiment in self.experiments), default=0)

    @property
    def file_bytes(self) -> int:
        """Default size of a loop device's file."""
        return max(LEAST_TARGET_BYTES, self.space_bytes)

    def deciding(self) -> dict[str, Any]:
        """Return the settings that determine the samples, for ``run.json``; the budget is not one of them."""
        options = self.options
        return {
            "profile": options.profile,
            "scenarios": list(options.scenarios),
            "stacks": list(options.stacks),
            "variant": options.variant,
            "repeats": options.repeats,
            "seed": options.seed,
            "steady_s": options.steady_s,
            "experiments": {
                experiment.name: {
                    "stacks": [stack.name for stack in experiment.stacks],
                    "parameters": asdict(experiment.parameters),
                }
                for experiment in self.experiments
            },
        }


def _require_used(options: Options, scenarios: Sequence[Scenario]) -> None:
    """Raise ConfigError for an option that no scenario uses."""
    if options.variant and all(options.variant not in scenario.variants for scenario in scenarios):
        known = ", ".join(f"{one.name}: {', '.join(one.variants)}" for one in scenarios if one.variants) or "none"
        raise ConfigError(f"no scenario has a variant {options.variant!r}", hint=f"there are: {known}")
    if options.threads and not any(scenario.sweeps_threads for scenario in scenarios):
        raise ConfigError(
            "--threads is for scenarios that run with several numbers of threads, and none of these does",
            hint="measure innodb-io or oltp-threads",
        )


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Given the arguments of a run and those of its second start, return what differs, in words."""
    old, new = dict(_flat(before, "")), dict(_flat(now, ""))
    return [
        f"{name}: {old.get(name, 'nothing')} the first time, {new.get(name, 'nothing')} now"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]


def _flat(value: Any, name: str) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - whatever JSON holds
    if isinstance(value, dict):
        for inner, one in value.items():
            yield from _flat(one, f"{name}, {inner}".removeprefix(", "))
    elif isinstance(value, (list, tuple)):
        yield name, ", ".join(map(str, value))
    elif value is not None:
        yield name, format_size(value) if name.endswith("_bytes") else str(value)


def make_plan(
    options: Options,
    *,
    scenarios: Sequence[Scenario],
    stacks: Mapping[str, Stack],
    missing_requirements: Callable[[Stack], Iterable[Reason]],
    memory_bytes: int,
    room_bytes: int,
) -> RunPlan:
    """Return what to measure of `options`.

    Args:
        options: those of the command line.
        scenarios: those of `options.scenarios`, in order, or the profile's.
        stacks: all that there are, by name.
        missing_requirements: returns those of a stack on this machine.
        memory_bytes: limit of the page cache.
        room_bytes: size of the target, or of the free space.

    Raises ConfigError for names that do not exist, for a variant that no scenario has, and if the data do not fit.
    """
    profile = PROFILE[options.profile]
    asked = [_stack(name, stacks) for name in dict.fromkeys(options.stacks)]
    _require_used(options, scenarios)
    problem = cache(lambda name: _sentence(missing_requirements(stacks[name])))
    experiments: list[Experiment] = []
    absent: list[Absent] = []
    refused: ConfigError | None = None
    for scenario in scenarios:
        missing = _sentence(scenario.missing())
        able: list[Stack] = []
        for stack in asked or _usual(scenario, profile, stacks):
            why = missing or scenario.suits(stack) or problem(stack.name)
            if why:
                absent.append(Absent(scenario=scenario, stack=stack, why=why, parameters=_known(scenario, options)))
            else:
                able.append(stack)
        if not able:
            continue
        try:
            parameters, needs = sized(scenario, options, memory_bytes=memory_bytes, room_bytes=room_bytes)
        except ConfigError as error:
            refused = refused or error
            if options.scenarios:
                raise
            # This one was not requested by name: the others are measured.
            absent += [
                Absent(scenario=scenario, stack=stack, why=error.message, parameters=_known(scenario, options))
                for stack in able
            ]
        else:
            experiments.append(Experiment(scenario=scenario, parameters=parameters, stacks=tuple(able), needs=needs))
    if refused is not None and not experiments:
        raise refused
    least = options.repeats or profile.least
    budget_s = options.budget_s or profile.budget_s
    return RunPlan(
        options=options,
        experiments=tuple(experiments),
        absent=tuple(absent),
        budget_s=budget_s,
        least=least,
        most=options.repeats or profile.most,
        width=profile.width,
        steady_s=_steady_s(options, profile, budget_s),
    )


def _steady_s(options: Options, profile: Profile, budget_s: float) -> float:
    if options.steady_s is None:
        return min(profile.steady_s, budget_s * _STEADY_SHARE)
    if options.steady_s >= budget_s:
        given, budget = format_duration(options.steady_s), format_duration(budget_s)
        raise ConfigError(
            f"--steady {given} uses up the budget, which is {budget}",
            hint="use a larger --budget, or a shorter --steady",
        )
    return options.steady_s


def _usual(scenario: Scenario, profile: Profile, stacks: Mapping[str, Stack]) -> list[Stack]:
    """Return the profile's stacks that suit a scenario; for one that compares others (file systems as such) all.

    The others lack nothing that the machine could get, so they are not absent. A requested stack is: it gets a reason.
    """
    suited = [stacks[name] for name in profile.stacks if name in stacks and scenario.suits(stacks[name]) is None]
    if len(suited) > 1 and any(stack.backend is not None for stack in suited):
        return suited
    return [stack for stack in stacks.values() if scenario.suits(stack) is None]


def _stack(name: str, stacks: Mapping[str, Stack]) -> Stack:
    if name not in stacks:
        raise ConfigError(f"unknown stack {name!r}", hint=f"there are: {', '.join(stacks)}")
    return stacks[name]


def _variant(scenario: Scenario, options: Options) -> str:
    return options.variant if options.variant in scenario.variants else next(iter(scenario.variants), "")


def _known(scenario: Scenario, options: Options) -> dict[str, Any]:
    return {"profile": options.profile, "variant": _variant(scenario, options)}


def _sentence(reasons: Iterable[Reason]) -> str:
    return "; ".join(reason.what + (f" ({reason.hint})" if reason.hint else "") for reason in reasons)


def sized(scenario: Scenario, options: Options, *, memory_bytes: int, room_bytes: int) -> tuple[Parameters, Needs]:
    """Return a scenario's parameters with as much data as asked for, or as fit."""
    given = Parameters(
        profile=options.profile,
        variant=_variant(scenario, options),
        size_bytes=options.size_bytes or 0,
        memory_bytes=memory_bytes,
        seed=options.seed,
        extra={"threads": options.threads} if options.threads and scenario.sweeps_threads else {},
    )
    parameters = scenario.parameters(given)
    if not parameters.size_bytes:
        parameters = scenario.parameters(replace(given, size_bytes=PROFILE[options.profile].size_bytes))
    needs = scenario.needs(parameters)
    while needs.space_bytes > room_bytes:
        half = parameters.size_bytes // 2 // _MIB * _MIB
        if options.size_bytes or half < LEAST_BYTES:
            raise ConfigError(
                f"{scenario.name} with {format_size(parameters.size_bytes)} of data needs "
                f"{format_size(needs.space_bytes)}, and there are {format_size(room_bytes)}",
                hint="use a larger target (--on)" + (", or less data (--size)" if options.size_bytes else ""),
            )
        parameters = scenario.parameters(replace(given, size_bytes=half))
        needs = scenario.needs(parameters)
    return parameters, needs
