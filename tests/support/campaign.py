"""The crash campaign: a command is repeated, killed at each call that changes something, and everything is looked at.

Scenes say what is there, commands what is run, `Site.complaints` what must hold: a new command is one line in
tests/crash. With ``SNAPMGR_CRASH_EVERY=1`` all points are tried, each with SIGKILL before and after; with N every Nth,
alternately before or after it.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import msgspec

from snapmgr.catalog.store import Catalog
from support.thoroughness import crash_every
from support.tracer import Kill, read_log

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from support.crashsite import Site
    from support.tracer import Call, Trace

EVERY = crash_every(120)
# One power cut for so many kills.
_CUT_EVERY = 3
_COUNT_FD = os.environ.get("SNAPMGR_CRASH_COUNT")
_MISSED_SHARE = 0.1
_ALIKE = 40
_KEPT = 5
_ENDINGS = (0, 1, 3, 4, 5, 6, 7)
_FAILURES_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command to be killed.

    What is run must succeed when it is left alone, and again after it was killed, unless `again` is something else.
    """

    name: str
    run: tuple[str, ...]
    scene: str
    """The saved state that it starts from; see `Site.save`."""
    first: tuple[tuple[str, ...], ...] = ()
    """What cannot be saved (mounts), run anew before each trial."""
    again: tuple[tuple[str, ...], ...] | None = None
    """What is run after a kill; by default the command itself. () where a second run says something else."""
    last: tuple[tuple[str, ...], ...] = ()
    """What is run in the end, to undo what the command is for."""
    own_etc: bool = False
    """Whether it changes /etc; see `Site.own_etc`."""


@dataclass(kw_only=True)
class Tally:
    """What was tried for one command, and how it went."""

    name: str
    points: int = 0
    """Calls that change something, in the command and in what it forks."""
    kills: int = 0
    power_cuts: int = 0
    missed: int = 0
    """Kills that came to nothing: the command had ended, as it may need fewer calls than when they were counted."""
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)


TALLIES: list[Tally] = []
"""Of this test run, for its last lines."""


def campaign(site: Site, command: Command, *, label: str, every: int = EVERY) -> Tally:
    """Try `command` at its points and return what came of it; also noted in `TALLIES`."""
    tally = Tally(name=label)
    TALLIES.append(tally)
    start = time.monotonic()
    trace = _trace(site, command)
    may_go = _deleted_by(site, command)
    tally.points = len(trace.calls)
    for kill, cut in _trials(trace, every):
        tally.kills += 1
        tally.power_cuts += cut
        try:
            complaints = _try(site, command, kill, may_go, tally, cut=cut)
        except (AssertionError, OSError) as error:
            complaints = [f"{type(error).__name__}: {error}"]
        if complaints:
            what = "power cut" if cut else "killed"
            tally.failures.append(f"{what} {kill}:\n    " + "\n    ".join(complaints))
    if tally.missed > max(tally.kills * _MISSED_SHARE, 1):
        tally.failures.append(f"{tally.missed} of {tally.kills} kills came to nothing: what was tried?")
    tally.seconds = time.monotonic() - start
    _announce(tally)
    return tally


def report(tally: Tally) -> str:
    """Return the failures as one text, for an assertion."""
    shown = tally.failures[:_FAILURES_SHOWN]
    return f"{tally.name}: {len(tally.failures)} of {tally.kills} trials failed\n" + "\n".join(shown)


HEADS = f"{'command':<44}{'points':>8}{'kills':>8}{'power cuts':>12}{'failures':>10}{'time':>9}"


def total(tallies: Sequence[Tally]) -> Tally:
    """Return the sum."""
    return Tally(
        name="all",
        points=sum(one.points for one in tallies),
        kills=sum(one.kills for one in tallies),
        power_cuts=sum(one.power_cuts for one in tallies),
        seconds=sum(one.seconds for one in tallies),
        failures=[failure for one in tallies for failure in one.failures],
    )


def row(one: Tally) -> str:
    """Return a tally as a line below `HEADS`."""
    return (
        f"{one.name:<44}{one.points:>8}{one.kills:>8}{one.power_cuts:>12}{len(one.failures):>10}{one.seconds:>7.0f} s"
    )


def _announce(tally: Tally) -> None:
    """Tell tests/crash_all.py, if that has started us; a line that is longer than a pipe takes at once might be cut."""
    if _COUNT_FD is not None:
        short = replace(tally, failures=[failure[:40] for failure in tally.failures[:50]])
        os.write(int(_COUNT_FD), msgspec.json.encode(short) + b"\n")


def _trace(site: Site, command: Command) -> Trace:
    """Run the command whole and return what it did."""
    _prepare(site, command)
    log = site.work / "calls"
    done = site.run(*command.run, log=log)
    assert done.returncode == 0, done.stderr
    trace = read_log(log)
    assert len(trace.calls) > 1
    return replace(trace, calls=_thinned(trace.calls))


def _thinned(calls: Sequence[Call]) -> tuple[Call, ...]:
    """Leave out the middle of what is the same step over and over, as the copying of hundreds of files.

    Of more than 40 calls of one name in one process the first and the last five stay. Statements are all different.
    """
    kinds: dict[tuple[int, str], list[Call]] = {}
    for call in calls:
        kinds.setdefault((call.role, call.name), []).append(call)
    dull = {
        call
        for (_, name), alike in kinds.items()
        if len(alike) > _ALIKE and name != "send"
        for call in alike[_KEPT:-_KEPT]
    }
    return tuple(call for call in calls if call not in dull)


def _deleted_by(site: Site, command: Command) -> set[str]:
    """Return the snapshots that the command deletes when it is left alone."""
    after = set(site.look().ready)
    _prepare(site, command)
    return set(site.look().ready) - after


def _prepare(site: Site, command: Command) -> None:
    site.restore(command.scene)
    site.own_etc = command.own_etc
    for step in command.first:
        site.must(*step)


def _trials(trace: Trace, every: int) -> Iterator[tuple[Kill, bool]]:
    """Yield what to try: a kill, and whether it is a power cut."""
    for number, call in enumerate(_some(trace.calls, every)):
        for after in (False, True) if every == 1 else (number % 2 == 1,):
            yield Kill(call=call, after=after, victim=call.role), False
            if call.role:
                # With its parent: then nobody is there to see that it died.
                yield Kill(call=call, after=after), False
            # Before a call is what was after the one before.
            if after if every == 1 else number % _CUT_EVERY == 0:
                yield Kill(call=call, after=after), True
    for child, calls in trace.beside.items():
        for call in _some(calls, every):
            yield Kill(call=call, after=True, victim=child), False


def _some(calls: Sequence[Call], every: int) -> list[Call]:
    """Return every Nth call, and the last one; of fewer than N the one in the middle, where most is half done."""
    offset = min(every, len(calls)) // 2 if every > 1 else 0
    return [call for index, call in enumerate(calls) if index % every == offset or index == len(calls) - 1]


def _try(site: Site, command: Command, kill: Kill, may_go: set[str], tally: Tally, *, cut: bool) -> list[str]:
    """Kill, clear up, look; return what is wrong."""
    _prepare(site, command)
    site.hurt_index(tally.kills)
    ready = site.trusted()
    done = site.run(*command.run, kill=kill)
    found = _ending(kill, done.returncode, done.stderr)
    tally.missed += not kill.victim and done.returncode != -signal.SIGKILL
    if kill.victim is not None and site.is_stopped():
        found.append("the server is stopped, though only one process of ours was killed")
    if cut:
        site.cut_power()
    site.hurt_index(tally.kills // 2 + 1)
    if kill.after and not cut:
        # The next run goes on by itself; otherwise doctor has to.
        for step in command.again if command.again is not None else (command.run,):
            found += _step(site, *step)
    site.hurt_index(tally.kills + 3)
    found += _step(site, "doctor", "--fix")
    found += _listing(site)
    # A mount that was complete when its maker died is somebody's, not debris.
    if Catalog(site.state).leases()[0]:
        found += _step(site, "umount", "--all")
    before = site.look()
    found += _step(site, "doctor", "--fix")
    after = site.look()
    if before.digest != after.digest:
        found.append("a second doctor --fix changed something")
    lost = ready - set(after.ready) - may_go
    found += [f"READY snapshot lost: {one} (now {after.other.get(one, 'forgotten')})" for one in sorted(lost)]
    for step in command.last:
        found += _step(site, *step)
    found += site.complaints()
    if cut and site.server is not None and after.ready:
        found += _step(site, "verify", "latest")
    return found


def _listing(site: Site) -> list[str]:
    """Return what `list` says other than the manifests do, whatever the index says."""
    done = site.run("list", "--json")
    listed = {one["id"]: one["state"] for one in msgspec.json.decode(done.stdout)["snapshots"]}
    stored = {entry.manifest.id: entry.manifest.state for entry in site.entries()}
    return [f"list says {listed}, but the manifests {stored}"] if listed != stored else []


def _ending(kill: Kill, code: int, said: str) -> list[str]:
    # A run may need fewer calls than the counted one; and of its child's death the command speaks.
    killed = code == -signal.SIGKILL and not kill.victim
    if "Traceback" in said or not (killed or code == 0 or (kill.victim and code in _ENDINGS)):
        return [f"it ended with {code}: {said.strip()}"]
    return []


def _step(site: Site, *arguments: str) -> list[str]:
    done = site.run(*arguments)
    if done.returncode == 0 and "Traceback" not in done.stderr:
        return []
    return [f"then {' '.join(arguments)} ended with {done.returncode}: {(done.stderr + done.stdout).strip()}"]
