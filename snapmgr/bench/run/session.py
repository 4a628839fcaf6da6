"""Prepares one call of ``bench run``: its plan, its target, and the samples that exist already."""

from __future__ import annotations

import os
import secrets
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapmgr import __version__
from snapmgr.bench.device.hostfacts import device_facts, host_facts
from snapmgr.bench.device.mark import usable_bytes
from snapmgr.bench.device.precondition import make_steady
from snapmgr.bench.device.target import DEFAULT_FOLDER, opened_target, parse_target
from snapmgr.bench.measure.memory import memory_bytes, nominal_bytes
from snapmgr.bench.run.conductor import Conductor
from snapmgr.bench.run.plan import LEAST_TARGET_BYTES, PROFILE, differences, make_plan
from snapmgr.bench.scenarios import chosen, scenarios
from snapmgr.bench.storage.contributed import all_stacks
from snapmgr.bench.storage.leftovers import clear_leftovers
from snapmgr.bench.storage.stacks import missing_requirements
from snapmgr.contract.backend import Runner
from snapmgr.contract.errors import CommandError, ConfigError, MissingRequirementError
from snapmgr.contract.units import format_size
from snapmgr.system.blockdev import device_stack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from snapmgr.bench.device.target import OpenTarget
    from snapmgr.bench.results.samples import Results
    from snapmgr.bench.run.conductor import Progress, RunSummary
    from snapmgr.bench.run.plan import Options, RunPlan

# Share of the free space of a folder: its owner may need some, too.
_SHARE = 0.8
_LEAST_MEMORY_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The request of ``bench run``."""

    options: Options
    on: str | None
    """Value of --on; None: a loop device on a file that fits."""
    wipe: str | None
    line: tuple[str, ...]
    """The user's command without --on and --wipe."""
    memory_bytes: int | None = None
    """Limit of the page cache; None: the machine's memory."""
    host_name: bool = False


@dataclass(frozen=True, kw_only=True)
class RunTarget:
    """Where a plan is carried out, in the terms of `snapmgr.bench.device.target`."""

    text: str
    size_bytes: int
    """The space needed, and the default size of a file."""
    file_bytes: int | None
    """Size of the loop device's file; None for a device."""


def planned(request: RunRequest) -> tuple[RunPlan, RunTarget]:
    """Return what to measure, and where. Changes nothing.

    Raises ConfigError, and MissingRequirementError with all reasons if nothing can be measured here.
    """
    options = request.options
    if request.memory_bytes is not None and request.memory_bytes < _LEAST_MEMORY_BYTES:
        raise ConfigError(
            f"--memory {format_size(request.memory_bytes)} is too little for fio and its buffers",
            hint=f"use at least {format_size(_LEAST_MEMORY_BYTES)}",
        )
    wanted = chosen(options.scenarios or PROFILE[options.profile].scenarios or [one.name for one in scenarios()])
    plan = make_plan(
        options,
        scenarios=wanted,
        stacks=all_stacks(),
        missing_requirements=missing_requirements,
        memory_bytes=min(request.memory_bytes or nominal_bytes(memory_bytes()), nominal_bytes(memory_bytes())),
        room_bytes=_room_bytes(request.on),
    )
    if not plan.experiments:
        why = dict.fromkeys(f"{absent.scenario.name} on {absent.stack.name}: {absent.why}" for absent in plan.absent)
        raise MissingRequirementError("nothing can be measured here: " + "; ".join(why), hint="see: snapmgr bench list")
    return plan, _place(request.on, plan)


def _room_bytes(on: str | None) -> int:
    if on is None:
        return _free(DEFAULT_FOLDER)
    spec = parse_target(on, size_bytes=None if on.startswith("loop:") else LEAST_TARGET_BYTES)
    if spec.kind == "loop":
        return (spec.size_bytes or 0) if on.startswith("loop:") else _free(spec.path)
    number = os.stat(spec.path).st_rdev
    return usable_bytes(device_stack(f"{os.major(number)}:{os.minor(number)}").size_bytes)


def _free(folder: str) -> int:
    facts = os.statvfs(folder)
    return int(facts.f_bavail * facts.f_frsize * _SHARE)


def _place(on: str | None, plan: RunPlan) -> RunTarget:
    text = on if on is not None else f"loop:{plan.file_bytes}"
    own_size = on is None or (not on.startswith("loop:") and Path(on).is_dir())
    size_bytes = plan.file_bytes if own_size else plan.space_bytes
    spec = parse_target(text, size_bytes=size_bytes)
    return RunTarget(text=text, size_bytes=size_bytes, file_bytes=spec.size_bytes)


def flash_bytes(place: RunTarget) -> int | None:
    """Return the size of a device that does not turn; None for others."""
    if place.file_bytes is not None or not _is_flash(device_facts(place.text)):
        return None
    return _room_bytes(place.text)


def _is_flash(device: Mapping[str, Any]) -> bool:
    return device.get("rotational") is False


def arguments(plan: RunPlan, place: RunTarget) -> dict[str, Any]:
    """Return the settings that determine the samples, for ``run.json``: a second start must have the same."""
    return {"on": place.text, **plan.deciding()}


def require_same(results: Results, now: dict[str, Any]) -> None:
    """Raise ConfigError, with what differs, if a folder holds a run with other arguments; CatalogError if damaged."""
    run = results.run()
    if run is not None and (differing := differences(run["arguments"], now)):
        raise ConfigError(
            f"{results.folder} holds a run with other arguments: {'; '.join(differing)}",
            hint="repeat the original arguments to continue it, or name another folder with -o",
        )


@contextmanager
def conductor(
    request: RunRequest,
    plan: RunPlan,
    place: RunTarget,
    results: Results,
    *,
    runner: Runner,
    tell: Callable[[str], None],
    step: Callable[[str], None],
    advance: Callable[[Progress], None],
) -> Iterator[Callable[[], RunSummary]]:
    """Yield a function that carries out a plan; target and folder of results are locked in this context.

    Raises what `opened_target` and `Results.locked` raise, and ConfigError as `require_same` does.
    """
    begun = time.monotonic()
    now = arguments(plan, place)
    if os.geteuid() == 0:
        # Before the device is examined: leftovers of a killed run hold it.
        for device in clear_leftovers(runner):
            tell(f"cleared what an earlier run had left on {device}")
    with (
        results.locked(),
        opened_target(
            place.text,
            size_bytes=place.size_bytes,
            wipe=request.wipe,
            # Smoke runs check that it works, not how fast.
            written=plan.options.profile != "smoke",
            line=request.line,
            runner=runner,
            tell=tell,
        ) as target,
    ):
        require_same(results, now)
        run = results.run() or results.begin(_new_run(plan, now))
        tell(f"measuring on {target.title}")
        host = host_facts(target.device, name=request.host_name)
        worker = Conductor(
            plan,
            results,
            str(run["id"]),
            target=target,
            host=host,
            ready=lambda: _conditioned(target, host, plan.steady_s, results, runner, tell),
            runner=runner,
            tell=tell,
            step=step,
            advance=advance,
        )
        yield lambda: worker.run(spent_s=time.monotonic() - begun)


def _conditioned(  # noqa: PLR0917 - all of it is given at one place
    target: OpenTarget,
    host: Mapping[str, Any],
    within_s: float,
    results: Results,
    runner: Runner,
    tell: Callable[[str], None],
) -> dict[str, Any]:
    """Bring flash to a steady state; return facts for the host: {"steady", "conditioning"}.

    None: it need not be steady (a disk that turns) or cannot be (a file). Flash that is not written to beforehand is
    discarded before each sample, so all find the same; but under lasting writes it would be slower.
    """
    if target.kind != "device" or not _is_flash(host.get("device") or {}):
        return {"steady": None}
    if not within_s:
        return {"steady": False}
    with results.work_folder() as folder:
        try:
            done = make_steady(target, within_s=within_s, folder=folder, runner=runner, tell=tell)
        except (OSError, CommandError):
            # Before the work folder goes, which may have filled the disk of the results.
            results.require_writable()
            raise
    target.discard = False
    return {"steady": done.steady, "conditioning": asdict(done)}


def _new_run(plan: RunPlan, now: dict[str, Any]) -> dict[str, Any]:
    at = datetime.now(UTC)
    return {
        "id": f"{at:%Y%m%dT%H%M%SZ}.{secrets.token_hex(4)}",
        "at": at.isoformat(timespec="seconds"),
        "arguments": now,
        "seed": plan.options.seed,
        "versions": {"snapmgr": __version__},
    }
