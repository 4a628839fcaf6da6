"""``snapmgr bench``."""

from __future__ import annotations

import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from snapmgr.bench.model import ProfileName
from snapmgr.cli.benchadvise import advise
from snapmgr.cli.benchcompare import compare
from snapmgr.cli.benchlist import list_
from snapmgr.cli.benchshow import show, write_page
from snapmgr.cli.output import format_table, is_terminal, print_lines
from snapmgr.cli.params import DurationText, SizeText, dry_run_option, json_option
from snapmgr.cli.signals import Interrupted
from snapmgr.contract.errors import EXIT_OK, CatalogError, ConfigError, InterruptedRunError, SnapmgrError
from snapmgr.contract.units import format_duration, format_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapmgr.bench.results.samples import Results
    from snapmgr.bench.run.conductor import Progress, RunSummary
    from snapmgr.bench.run.plan import RunPlan
    from snapmgr.bench.run.session import RunRequest, RunTarget
    from snapmgr.cli.session import Session

PAGE = "report.html"


class _ThreadsText(click.ParamType[tuple[int, ...]]):
    """A list of numbers: "1,8,64"."""

    name = "threads"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:  # noqa: ANN401 - click's signature
        if isinstance(value, tuple):
            return value
        try:
            return tuple(int(word) for word in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not a list of numbers like 1,8,64", param, ctx)


@click.group(
    epilog="""\b
Examples:
  snapmgr bench run
  snapmgr bench run random-update --on /dev/sdx --stacks btrfs,lvm-thin+xfs -o results
  snapmgr bench list
  snapmgr bench show results -o report.html
  snapmgr bench advise --for oltp results
"""
)
def command() -> None:
    """Benchmark snapshots on this machine's storage."""


@command.command(
    epilog="""\b
Examples:
  snapmgr bench run
  snapmgr bench run --dry-run --profile standard --on /dev/sdx
  snapmgr bench run random-update --on loop:4G:/srv --stacks btrfs,xfs-reflink,ext4 -o results
  snapmgr bench run --on /dev/sdx --wipe S3Z9NB0K123456 --budget 2h -o results

\b
A device loses its contents: it must be blank, or named by its serial number
(--wipe). The same command with the same -o continues an interrupted run.
Exit codes: 1 if a storage failed too often, 2 if the device or an argument is
refused, 7 if nothing can be measured here; see snapmgr --help.
"""
)
@click.argument("scenarios", metavar="[SCENARIO...]", nargs=-1)
@click.option(
    "--on",
    metavar="loop:SIZE[:FOLDER]|DEVICE|FOLDER",
    help="Device, or folder for a loop device.  [default: a loop device that fits]",
)
@click.option("--stacks", metavar="NAME,...", default="", help="Storages to compare.  [default: those of the profile]")
@click.option(
    "--profile",
    type=click.Choice(get_args(ProfileName)),
    default="quick",
    help="Size and thoroughness of the run.  [default: quick]",
)
@click.option("--budget", "budget_s", metavar="DURATION", type=DurationText(), help='Time limit of the run: "10m".')
@click.option("--size", "size_bytes", metavar="SIZE", type=SizeText(), help="Size of the data set.")
@click.option("--memory", "memory_bytes", metavar="SIZE", type=SizeText(), help="Limit memory and page cache.")
@click.option("--repeats", metavar="N", type=click.IntRange(min=1, max=1000), help="Measure exactly N blocks.")
@click.option(
    "--threads",
    metavar="N,...",
    type=_ThreadsText(),
    default=(),
    help="Numbers of threads or clients to run with; for innodb-io and oltp-threads.",
)
@click.option("--variant", metavar="NAME", default="", help="Variant of a scenario; bench list shows them.")
@click.option(
    "--steady",
    "steady_s",
    metavar="DURATION",
    type=DurationText(zero=True),
    help="Time limit for bringing flash to a steady state before measuring.",
)
@click.option(
    "--seed",
    metavar="N",
    type=click.IntRange(min=0),
    default=1,
    help="Seed for sample order and generated data.  [default: 1]",
)
@click.option("--wipe", metavar="SERIAL", help="Overwrite the device with this serial number.")
@click.option("--host-name", is_flag=True, help="Record the host name in the results.")
@click.option(
    "-o",
    "--output",
    "folder",
    metavar="RESULTS",
    type=click.Path(path_type=Path),
    help="Folder for the samples.  [default: snapmgr-bench-TIME, here]",
)
@dry_run_option
@json_option
@click.pass_obj
def run(session: Session, /, scenarios: tuple[str, ...], folder: Path | None, *, dry_run: bool, **options: Any) -> int:  # noqa: ANN401 - click's
    """Measure scenarios on fresh storages, and write a page.

    Each sample gets a fresh file system. Samples run in mirrored order (A B B A), and some storages run twice to show
    the noise. The run ends when the ratios are precise enough, or when the budget is used up.
    """
    from snapmgr.bench.results.samples import Results
    from snapmgr.bench.run.session import planned

    request = _request(scenarios, options)
    plan, place = planned(request)
    if dry_run:
        return _show_plan(session, request, plan, place)
    path = folder or Path(f"snapmgr-bench-{datetime.now().astimezone():%Y%m%d-%H%M%S}")
    results = Results(path)
    try:
        ended = _carry_out(session, request, plan, place, results)
    except Interrupted as signal:
        kept = 0
        # The run may have been interrupted before the first sample.
        with suppress(CatalogError, ConfigError):
            kept = sum(1 for one in results.samples() if one["kind"] != "absent")
        if not kept:
            raise
        go_on = f"to continue, repeat the command with -o {path}; to see them: snapmgr bench show {path}"
        raise InterruptedRunError(str(signal), hint=f"{kept} samples are kept; {go_on}") from None
    return _conclude(session, results, ended)


command.add_command(list_)
command.add_command(show)
command.add_command(compare)
command.add_command(advise)


def _request(scenarios: tuple[str, ...], options: dict[str, Any]) -> RunRequest:
    from snapmgr.bench.run.plan import Options
    from snapmgr.bench.run.session import RunRequest

    stacks = tuple(name.strip() for name in options["stacks"].split(",") if name.strip())
    wanted = Options(
        scenarios=tuple(dict.fromkeys(scenarios)),
        stacks=stacks,
        profile=options["profile"],
        variant=options["variant"],
        threads=options["threads"],
        size_bytes=options["size_bytes"],
        repeats=options["repeats"],
        budget_s=options["budget_s"],
        steady_s=options["steady_s"],
        seed=options["seed"],
    )
    ctx = click.get_current_context()
    return RunRequest(
        options=wanted,
        on=options["on"],
        wipe=options["wipe"],
        line=_line(ctx, scenarios),
        memory_bytes=options["memory_bytes"],
        host_name=options["host_name"],
    )


def _line(ctx: click.Context, scenarios: tuple[str, ...]) -> tuple[str, ...]:
    """Return the given command without --on and --wipe: a refusal prints it, completed, to be pasted."""
    line = ["snapmgr", "bench", "run", *scenarios]
    for parameter in ctx.command.params:
        value = ctx.params.get(parameter.name or "")
        if not isinstance(parameter, click.Option) or parameter.name in {"on", "wipe"} or value == parameter.default:
            continue
        if value is True:
            line.append(parameter.opts[-1])
        elif value is not None and value is not False and value != "":
            given = f"{value:g}s" if isinstance(value, float) else str(value)
            if isinstance(value, tuple):
                given = ",".join(map(str, value))
            line += [parameter.opts[-1], given]
    return tuple(line)


def _show_plan(session: Session, request: RunRequest, plan: RunPlan, place: RunTarget) -> int:
    from dataclasses import asdict

    from snapmgr.bench.device.target import preview_target
    from snapmgr.bench.run.forecast import forecast, preparation_s
    from snapmgr.bench.run.session import flash_bytes

    where = preview_target(place.text, size_bytes=place.size_bytes, wipe=request.wipe, line=request.line)
    file_bytes = place.file_bytes if plan.options.profile != "smoke" else None
    flash = flash_bytes(place)
    first_s = preparation_s(file_bytes, flash, steady_s=plan.steady_s)
    steps, over = forecast(plan, spent_s=first_s)
    absent = [{"scenario": one.scenario.name, "stack": one.stack.name, "why": one.why} for one in plan.absent]
    total_s = first_s + sum(step.seconds for step in steps)
    if session.json:
        session.document(
            EXIT_OK,
            dry_run=True,
            on=where,
            budget_s=plan.budget_s,
            preparation_s=first_s,
            steps=[asdict(step) for step in steps],
            total_s=total_s,
            space_bytes=plan.space_bytes,
            left_out=list(over),
            absent=absent,
        )
        return EXIT_OK
    rows = [
        [
            step.what,
            " ".join(step.stacks),
            format_duration(step.seconds),
            format_size(step.space_bytes),
            _fits(step.fits),
        ]
        for step in steps
    ]
    print_lines(
        [
            f"would measure on {where}",
            *([f"first {_first(flash)}, {format_duration(first_s)}"] if first_s else []),
            *format_table(("STEP", "STORAGES, A FRESH ONE EACH", "TIME", "SPACE", "BUDGET"), rows),
            f"at least {format_duration(total_s)} in all on a disk of 100 MB/s and 1,000 IOPS; the run corrects this "
            f"as it measures. The budget is {format_duration(plan.budget_s)}.",
            *over,
            *(f"not here: {one['scenario']} on {one['stack']}: {one['why']}" for one in absent),
        ]
    )
    return EXIT_OK


def _first(flash: int | None) -> str:
    if flash is None:
        return "write its blocks"
    return f"write its {format_size(flash)} twice, then at random until it is steady (--steady; --steady 0 skips this)"


def _fits(fits: bool) -> str:
    return "fits" if fits else "does not fit"


def _carry_out(session: Session, request: RunRequest, plan: RunPlan, place: RunTarget, results: Results) -> RunSummary:
    from snapmgr.bench.run.session import arguments as arguments_of
    from snapmgr.bench.run.session import conductor, require_same
    from snapmgr.cli.running import VerboseRunner

    if os.path.isdir(results.folder):
        # Nothing has been written yet.
        require_same(results, arguments_of(plan, place))
    for absent in plan.absent:
        session.console.detail(f"not here: {absent.scenario.name} on {absent.stack.name}: {absent.why}")
    advance, step = _progress(session)
    with conductor(
        request,
        plan,
        place,
        results,
        runner=VerboseRunner(session.console.detail),
        tell=session.console.tell,
        step=step,
        advance=advance,
    ) as work:
        ended = work()
    session.console.close()
    return ended


def _progress(session: Session) -> tuple[Callable[[Progress], None], Callable[[str], None]]:
    import sys

    last: list[Progress] = []
    bar = is_terminal(sys.stderr) and not session.verbose

    def advance(now: Progress) -> None:
        last[:] = [now]
        what = f"{now.what}, about {format_duration(now.left_s)} left"
        session.console.progress(what, now.done, now.total)

    def step(text: str) -> None:
        # One line per step only with --verbose; a progress bar changes its text instead.
        if bar and last:
            now = last[0]
            session.console.progress(f"{text}, about {format_duration(now.left_s)} left", now.done, now.total)
        else:
            session.console.detail(text)

    return advance, step


def _conclude(session: Session, results: Results, ended: RunSummary) -> int:
    """Write the page and print the result."""
    page = results.folder / PAGE
    document = write_page([results.folder], page)
    error: SnapmgrError | None = None
    if ended.given_up:
        error = SnapmgrError(
            "; ".join(ended.given_up),
            hint=f"everything else was measured; for the reasons: snapmgr bench show {results.folder}",
        )
    elif ended.failed and ended.failed == ended.measured:
        error = SnapmgrError("every sample failed", hint=f"for the reasons: snapmgr bench show {results.folder}")
    for sentence in ended.left_out:
        session.console.tell(sentence)
    if ended.left_out:
        session.console.tell(f"to continue, repeat the command with a larger --budget and -o {results.folder}")
    if session.json:
        session.document(
            error.exit_code if error else EXIT_OK,
            error,
            dry_run=False,
            results=str(results.folder),
            report=str(page),
            measured=ended.measured,
            failed=ended.failed,
            left_out=list(ended.left_out),
            given_up=list(ended.given_up),
            found=document,
        )
    else:
        made = (
            f"{ended.measured} samples, {ended.failed} of them failed"
            if ended.measured
            else "everything was measured before"
        )
        session.console.tell(f"{made}, in {results.folder}")
        for sentence in document["recommendation"]["sentences"][:1]:
            session.console.tell(sentence["text"])
        session.console.tell("the page, for a browser:")
        print_lines([str(page)])
    if error is not None:
        raise error
    return EXIT_OK
