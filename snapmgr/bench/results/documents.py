"""Defines the documents of results, and checks them when they are read; later code relies on that check.

It has a type for every field that a report or a comparison uses. Unknown fields are ignored: a later version may add
some.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict, TypeVar

import msgspec

_T = TypeVar("_T")
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""Bytes and other things that are counted."""
# No figure in an SI unit is beyond these, and whatever is computed from such figures is finite as well.
_LEAST, _MOST = 1e-100, 1e100
_DEEPEST = 50


class Arguments(TypedDict, total=False):
    """The settings that determine the samples; a resumed run has the same."""

    stacks: list[str] | None


class Run(TypedDict):
    """``run.json``: the requested run."""

    schema: int
    id: str
    at: str
    """When it began: ISO 8601, UTC."""
    arguments: Arguments
    seed: int
    versions: dict[str, str]


class Info(TypedDict):
    """Meaning of a figure; see `snapmgr.bench.model.MetricInfo`."""

    title: str
    unit: str
    better: Literal["less", "more", "neither"]
    headline: NotRequired[bool]


class Axis(TypedDict):
    """Meaning of a series and its axes; see `snapmgr.bench.model.Outcome`."""

    title: str
    x_title: str
    x_unit: str
    x: list[float]
    unit: str


class LayoutDocument(TypedDict):
    """Where a file's blocks were; see `snapmgr.bench.measure.layout.BlockLayout.document`."""

    size_bytes: Count
    extents: Count
    gaps_per_gib: float
    points: NotRequired[list[tuple[Count, Count, Count]]]
    caveats: NotRequired[list[str]]


class Proof(TypedDict):
    """One check; see `snapmgr.bench.model.Check`."""

    name: str
    ok: bool
    detail: str


class Parameters(TypedDict, total=False):
    """Size and duration; see `snapmgr.bench.model.Parameters`."""

    profile: str
    size_bytes: Count


class Loop(TypedDict, total=False):
    """The file system and devices below a loop device's file."""

    file_system: str | None
    on: list[Device]


class Device(TypedDict, total=False):
    """A block device and those below it; see `snapmgr.bench.device.hostfacts.device_facts`."""

    name: str | None
    kind: str | None
    size_bytes: Count | None
    model: str | None
    rotational: bool | None
    loop: Loop | None
    below: list[Device]


class Processor(TypedDict, total=False):
    """See `snapmgr.bench.device.hostfacts.cpu_facts`."""

    model: str | None
    usable: Count | None


class Hypervisor(TypedDict, total=False):
    """See `snapmgr.bench.device.hostfacts.virtualisation`."""

    vm: str | None


class Host(TypedDict, total=False):
    """Facts about machine, device and target, by `snapmgr.bench.device.hostfacts.host_facts`; empty if unknown."""

    kernel: str | None
    cpu: Processor | None
    memory_bytes: Count | None
    virtualisation: Hypervisor | str | None
    device: Device | None
    packages: dict[str, str]
    target: dict[str, Any]
    steady: bool | None


class Guarantee(TypedDict):
    """See `snapmgr.contract.records.Capabilities`."""

    atomicity: Literal["file", "volume"]
    clone: Literal["native", "scratch", "none"]
    survives_origin: bool


class Sample(TypedDict):
    """One file: the result of one run of a scenario on one stack, on a fresh file system."""

    schema: int
    id: str
    run: str
    scenario: str
    variant: str
    stack: str
    kind: Literal["measured", "pilot", "a/a", "absent"]
    """"absent": cannot run on this machine; `failure` has the reason."""
    block: Count
    position: Count
    at: str
    seconds: float
    parameters: Parameters
    metrics: dict[str, float]
    infos: dict[str, Info]
    series: dict[str, list[float]]
    axes: dict[str, Axis]
    """Of each series, under its name."""
    layouts: dict[str, LayoutDocument]
    checks: list[Proof]
    notes: list[str]
    spent: dict[str, Any]
    commands: list[str | list[str]]
    jobs: dict[str, str]
    provisioned: dict[str, Any]
    guarantee: NotRequired[Guarantee | None]
    """What the backend promises of its snapshots; None if it was not asked, or if there are none."""
    host: Host
    failure: str
    """Why it counts for nothing; "" if it counts."""


def require_whole(document: dict[str, Any], kind: type[_T]) -> None:
    """Raise ValueError, with the fault and its place, for an incomplete or distorted document."""
    try:
        msgspec.convert(document, kind)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    for name, value in document.items():
        # Thousands of numbers whose types say enough.
        if name != "layouts":
            _require_sane(value, f"$.{name}", _DEEPEST)
    for name in document.get("series", ()):
        if name not in document["axes"]:
            raise ValueError(f"the series {name!r} has no axis - at `$.axes`")


def _require_sane(value: Any, place: str, depth: int) -> None:  # noqa: ANN401 - whatever JSON holds
    """Raise ValueError for numbers beyond any real figure, and for values nested too deeply to be shown."""
    if not depth:
        raise ValueError(f"it is nested too deeply - at `{place}`")
    if isinstance(value, dict):
        for name, inner in value.items():
            _require_sane(inner, f"{place}.{name}", depth - 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            _require_sane(inner, place, depth - 1)
    elif isinstance(value, int | float) and value and not _LEAST <= abs(value) <= _MOST:
        raise ValueError(f"no figure is as large or as small as this number - at `{place}`")
