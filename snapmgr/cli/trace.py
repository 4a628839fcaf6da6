"""``snapmgr trace``."""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast, get_args

import click

from snapmgr.cli.output import clean, format_table, print_lines
from snapmgr.cli.params import DurationText, SizeText, json_option
from snapmgr.cli.signals import handled
from snapmgr.contract.errors import EXIT_OK, ConfigError, NotFoundError, SnapmgrError
from snapmgr.contract.units import format_duration, format_size
from snapmgr.trace.analysis import By

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from snapmgr.cli.session import Session
    from snapmgr.trace.accesslog import Trace
    from snapmgr.trace.analysis import Analysis, Total
    from snapmgr.trace.compare import Side
    from snapmgr.trace.record import Recorded
    from snapmgr.trace.verdict import Verdict

_LIMIT_BYTES = 1 << 30
_TOP = 10
_HEADS = ("COUNT", "FAILED", "BYTES", "TIME", "P50", "P95", "P99", "MAX")
_STOPPED = {
    "command": "the command has ended",
    "signal": "as requested",
    "time": "the time limit was reached",
    "size": "the size limit was reached",
    "mount": "the mount no longer answers",
}


@click.group(
    epilog="""\b
Examples:
  snapmgr trace record /mnt/jfs -o run.log.gz -- ./nightly.sh
  snapmgr trace show run.log.gz
  snapmgr trace show run.log.gz -o run.html
  snapmgr trace compare run.log.gz later.log.gz -o change.html
"""
)
def command() -> None:
    """Record, analyse and draw the operations of a JuiceFS mount."""


@command.command(
    epilog="""\b
Examples:
  snapmgr trace record /mnt/jfs -- mariadb-backup --prepare --target-dir=/mnt/jfs/full
  snapmgr trace record /mnt/jfs -o run.log.gz --for 10m

\b
The file is the client's own log, compressed with gzip: zcat prints it, and
"juicefs profile" reads it uncompressed. The exit code is that of COMMAND, if given.
""",
)
@click.argument("mount", metavar="MOUNT", type=click.Path(path_type=Path))
@click.argument("argv", metavar="[-- COMMAND...]", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A new file.  [default: trace-VOLUME-TIME.log.gz in this directory]",
)
@click.option(
    "--limit",
    "limit_bytes",
    metavar="SIZE",
    type=SizeText(),
    default=_LIMIT_BYTES,
    help="Stop when the file has this size.  [default: 1G]",
)
@click.option("--for", "duration_s", metavar="DURATION", type=DurationText(), help='Stop after this time, as in "10m".')
@json_option
@click.pass_obj
def record(
    session: Session,
    mount: Path,
    argv: tuple[str, ...],
    *,
    output: Path | None,
    limit_bytes: int,
    duration_s: float | None,
) -> int:
    """Record a mount's operations while COMMAND runs, or until Ctrl-C.

    MOUNT is any directory in the mount. COMMAND gets this terminal, directory and environment. A limit ends the
    recording, not the command. The mount's counters are recorded too, so that "trace show" can find lost operations.
    """
    from snapmgr.trace.mounted import find_mount
    from snapmgr.trace.record import record

    found = find_mount(mount)
    path = output or _new_name(found.volume)
    came: list[int] = []
    # A signal is the normal end of a recording.
    with handled(lambda number, _frame: came.append(number)):
        if not argv:
            session.console.tell(f"recording {found.point} to {path}; Ctrl-C stops it")
        recorded = record(
            found,
            path,
            limit_bytes=limit_bytes,
            duration_s=duration_s,
            command=argv,
            stopped=lambda: came[0] if came else 0,
        )
    _tell_recorded(session, recorded)
    return recorded.command_exit or EXIT_OK


def _new_name(volume: str) -> Path:
    return Path(f"trace-{volume}-{datetime.now().astimezone():%Y%m%d-%H%M%S}.log.gz")


def _tell_recorded(session: Session, recorded: Recorded) -> None:
    if session.json:
        session.document(
            recorded.command_exit or EXIT_OK,
            **asdict(recorded) | {"path": str(recorded.path)},
        )
        return
    if recorded.stopped_by in {"size", "mount"}:
        session.console.warn(f"the recording ended early: {_STOPPED[recorded.stopped_by]}")
    what = f"{format_duration(recorded.wall_s)} in {format_size(recorded.size_bytes)}"
    session.console.tell(f"recorded {what}: {_STOPPED[recorded.stopped_by]}")
    session.console.tell(f"next: snapmgr trace show {recorded.path}")
    print_lines([str(recorded.path)])


@command.command(
    epilog="""\b
Examples:
  snapmgr trace show run.log.gz
  snapmgr trace show run.log.gz --by file --top 30
  snapmgr trace show run.log.gz -o run.html
  zcat old.log.gz | snapmgr trace show - --json
"""
)
@click.argument("file", metavar="FILE", type=click.Path())
@click.option("--by", type=click.Choice(get_args(By)), help="Print only this table.  [default: all three]")
@click.option(
    "--top", type=click.IntRange(min=1), default=_TOP, help=f"Number of lines in each table.  [default: {_TOP}]"
)
@click.option(
    "-o",
    "--output",
    metavar="FILE.html",
    type=click.Path(path_type=Path),
    help="Draw a timeline of the threads, as an HTML page.",
)
@click.option(
    "--perfetto", metavar="FILE.json[.gz]", type=click.Path(path_type=Path), help="Write a file for trace viewers."
)
@json_option
@click.pass_obj
def show(session: Session, file: str, *, by: By | None, top: int, output: Path | None, perfetto: Path | None) -> int:
    """Summarise a recorded log, name its bottleneck, and draw it.

    FILE was written by "trace record", or is any log of a JuiceFS client (.accesslog, .oplog), plain or compressed with
    gzip; "-" is stdin. Only the counters that "trace record" adds show whether lines are missing.
    """
    from snapmgr.trace.analysis import analyse, facts_of
    from snapmgr.trace.reading import read_trace
    from snapmgr.trace.verdict import judge

    trace = read_trace(file)
    analysis = analyse(trace)
    verdict = judge(facts_of(trace, analysis))
    _draw(session, trace, analysis, verdict, file, output=output, perfetto=perfetto)
    if session.json:
        _show_document(session, trace, analysis, verdict, by=by, top=top)
        return EXIT_OK
    for warning in analysis.caveats:
        session.console.warn(warning)
    print_lines([*_summary(trace, analysis), *_tables(analysis, by, top), "", *_verdict_lines(verdict)])
    return EXIT_OK


@command.command(
    epilog="""\b
Examples:
  snapmgr trace compare before.log.gz after.log.gz
  snapmgr trace compare before.log.gz after.log.gz -o change.html
"""
)
@click.argument("a", metavar="A", type=click.Path())
@click.argument("b", metavar="B", type=click.Path())
@click.option(
    "-o",
    "--output",
    metavar="FILE.html",
    type=click.Path(path_type=Path),
    help="Draw both timelines on one axis, as an HTML page.",
)
@json_option
@click.pass_obj
def compare(session: Session, a: str, b: str, *, output: Path | None) -> int:
    """Say what changed between two recorded logs, and draw both.

    A and B are logs as for "trace show", of the same program: before and after a change of the mount or the program.
    """
    from snapmgr.trace.compare import caveats, changed, measures

    first, second = _side(a), _side(b)
    if output is not None:
        from snapmgr.trace.page import write_comparison

        title = f"{os.path.basename(a)} and {os.path.basename(b)}"
        _write(output, (".html", ".htm"), lambda out: write_comparison(first, second, out, title=title))
        session.console.tell(f"wrote {output}: open it in a browser")
    noted, found, rows = caveats(first, second), changed(first, second), measures(first, second)
    if session.json:
        session.document(
            EXIT_OK,
            changed=found,
            caveats=noted,
            measures=[asdict(row) | {"change": row.change} for row in rows],
            verdicts=[[asdict(one) for one in side.verdict.findings] for side in (first, second)],
        )
        return EXIT_OK
    for caveat in noted:
        session.console.warn(caveat)
    cells = [[row.name, row.shown(row.a), row.shown(row.b), row.change or "-"] for row in rows]
    print_lines([*map(clean, found), "", *format_table(("MEASURE", "A", "B", "CHANGE"), cells)])
    return EXIT_OK


def _side(file: str) -> Side:
    from snapmgr.trace.analysis import analyse, facts_of
    from snapmgr.trace.compare import Side
    from snapmgr.trace.reading import read_trace
    from snapmgr.trace.verdict import judge

    trace = read_trace(file)
    analysis = analyse(trace)
    return Side(trace=trace, analysis=analysis, verdict=judge(facts_of(trace, analysis)))


def _draw(
    session: Session,
    trace: Trace,
    analysis: Analysis,
    verdict: Verdict,
    file: str,
    *,
    output: Path | None,
    perfetto: Path | None,
) -> None:
    title = "stdin" if file == "-" else os.path.basename(file)
    if output is not None:
        from snapmgr.trace.page import write_page

        def page(out: IO[bytes]) -> None:
            write_page(trace, out, analysis=analysis, verdict=verdict, title=title)

        _write(output, (".html", ".htm"), page)
        session.console.tell(f"wrote {output}: open it in a browser")
    if perfetto is not None:
        from snapmgr.trace.perfetto import write_perfetto

        _write(perfetto, (".json", ".json.gz"), lambda out: write_perfetto(trace.recorded, out, title=title))
        session.console.tell(f"wrote {perfetto}: open it at ui.perfetto.dev or in another trace viewer")


def _write(path: Path, endings: tuple[str, str], write: Callable[[IO[bytes]], None]) -> None:
    import gzip

    # An existing file is replaced. The ending makes sure that it is not a recording, given by mistake.
    if not path.name.endswith(endings):
        raise ConfigError(f"{path} ends with neither {' nor '.join(endings)}", hint=f"name it {path}{endings[0]}")
    try:
        with gzip.open(path, "wb", compresslevel=6) if path.suffix == ".gz" else open(path, "wb") as out:
            write(cast("IO[bytes]", out))
    except (FileNotFoundError, NotADirectoryError):
        raise NotFoundError(f"there is no folder {path.parent}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder") from None
    except OSError as error:
        raise SnapmgrError(f"cannot write {path}: {error.strerror}") from None


def _summary(trace: Trace, analysis: Analysis) -> list[str]:
    from snapmgr.trace.analysis import described

    lines = [clean(described(trace))] if described(trace) else []
    lines.append(
        f"{analysis.operations} operations in {format_duration(analysis.wall_s)}; "
        f"{analysis.mean_under_way:.1f} under way on average, {analysis.max_under_way} at most; "
        f"{format_duration(analysis.busy_s.get('fsync', 0.0))} in fsync"
    )
    if analysis.counted is not None:
        counted = analysis.counted
        lines.append(
            f"objects: {counted.gets} GET of {format_size(counted.get_bytes)}, {counted.puts} PUT of "
            f"{format_size(counted.put_bytes)}, {format_size(counted.compaction_bytes)} compacted; "
            f"cache: {counted.cache_hits} hits, {counted.cache_misses} misses, {counted.evictions} evicted; "
            f"client: {format_duration(counted.cpu_s)} of processor"
        )
    return lines


def _tables(analysis: Analysis, by: By | None, top: int) -> Iterator[str]:
    for kind in (by,) if by else get_args(By):
        shown = analysis.totals[kind][:top]
        if not shown:
            continue
        yield ""
        yield from format_table((kind.upper(), *_HEADS), [_cells(total) for total in shown])
        rest = len(analysis.totals[kind]) - len(shown)
        if rest:
            yield f"… and {rest} more"


def _cells(total: Total) -> list[str]:
    times = (total.p50_us, total.p95_us, total.p99_us, total.max_us)
    return [
        clean(total.key),
        str(total.count),
        str(total.failed or "-"),
        format_size(total.size_bytes) if total.size_bytes else "-",
        format_duration(total.total_us / 1e6),
        *(_latency(taken_us) for taken_us in times),
    ]


def _latency(taken_us: int) -> str:
    # Many operations take a few microseconds, which would all be 0.0 ms.
    return f"{taken_us} µs" if taken_us < 1000 else format_duration(taken_us / 1e6)  # noqa: PLR2004


def _verdict_lines(verdict: Verdict) -> list[str]:
    lines = []
    for number, finding in enumerate(verdict.findings):
        lines.append(f"{'verdict' if number == 0 else 'also'}: {finding.bottleneck}: {finding.why}")
        lines.append(f"  try: {finding.advice}" if finding.action != "none" else f"  {finding.advice}")
    if verdict.condition:
        lines.append(f"true {verdict.condition}")
    return lines


def _show_document(
    session: Session, trace: Trace, analysis: Analysis, verdict: Verdict, *, by: By | None, top: int
) -> None:
    fields: dict[str, Any] = asdict(analysis)
    fields["totals"] = {
        kind: [asdict(total) for total in found[:top]] for kind, found in analysis.totals.items() if by in {None, kind}
    }
    header = {name: value for name, value in (trace.header or {}).items() if name != "counters"}
    session.document(
        EXIT_OK,
        recording=header or None,
        truncated=trace.truncated,
        untimed=trace.operations.untimed,
        analysis=fields,
        verdict={"findings": [asdict(finding) for finding in verdict.findings], "condition": verdict.condition},
    )
