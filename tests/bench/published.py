"""The published experiments, repeated on an emulated spinning disk: `snapmgr bench run` in a User Mode Linux guest.

It has real LVM and real btrfs, on a file in memory that is as slow as a disk (tests/lab/disk).

Each sample is on disk at once: what was interrupted goes on at the next start with the same --keep, in the same order.

    ./run measure published --list                            # what is there, what is missing, how long it will take
    ./run measure published                                   # everything: some hours
    ./run measure published --only repaired,printed
    ./run measure published --unpack tests/golden/bench/published.tar.xz   # go on with the samples that are committed
    ./run measure published --pack tests/golden/bench/published.tar.xz     # the samples, as they are committed
    ./run measure published --report tests/golden/bench/published.tar.xz   # the tables of
    docs/explanation/published-experiments.md
    ./run measure published --chart tests/golden/bench/published.tar.xz    # its picture, published-experiments.svg
"""

from __future__ import annotations

import argparse
import io
import math
import os
import subprocess
import sys
import tarfile
from collections import Counter
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from snapmgr.bench.published.figures import STALLS
from snapmgr.bench.published.judgement import compare_published
from snapmgr.bench.results.samples import Results, read
from snapmgr.bench.scenarios.blog import scenario as blog
from snapmgr.bench.statistics.comparison import groups
from snapmgr.contract.units import format_duration, format_quantity
from snapmgr.drawing.ratios import RatioGroup, RatioRow, ratio_chart
from snapmgr.drawing.svg import WIDE
from support.spinningdisk import disk_library, preloading
from support.storage import work_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from snapmgr.drawing.ratios import Kind

_ROOT = Path(__file__).parents[2]
_KEEP = Path("/var/tmp/snapmgr-bench-published")
_STACKS = ("lvm+ext4", "btrfs")
_CONTROL = "ext4"
_DISK_BYTES = 4 << 30
# The published 100 GB were six times the machine's memory; here data must at least not fit into it.
_DATA_BYTES = 600_000_000
_MEMORY_MIB = 384
_GUEST_S = 12 * 3600
_GUESS_S = 150.0
_DISK = "/dev/mapper/spinning"
_UUID = "LAB-spinning"
# Of all that is measured, what the page speaks of.
_FIGURES = {
    *("fill_s", "fill_unsynced_s", "update_first_s", "update_first_unsynced_s", "update_first_written_per_byte"),
    *("update_none_s", "update_second_s", "update_cost", "read_before_bytes_s", "read_after_bytes_s"),
    *("read_before_buffered_s", "read_after_buffered_s", "extents_before", "extents_after", "create_s"),
    *("reads_before", "reads_after", "writes_before", "writes_after", "windows_without_write_before"),
    *("windows_without_write_after", "windows_without_read_before", "windows_without_read_after"),
    *("intervals_without_write_before", "intervals_without_write_after", "longest_without_write_after_s"),
    *("files_written_before", "files_written_after"),
}
# Of the published ratios, those that the picture shows. Extents would need a scale of their own.
_DRAWN = {
    "random-update/fill": "Fill, LVM + ext4 ÷ btrfs",
    "random-update/update-durable": "Random updates until durable, LVM + ext4 ÷ btrfs",
    "random-update/read": "Linear read afterwards, LVM + ext4 ÷ btrfs",
    "blog/reads-after": "Blogs read after the snapshot, LVM + ext4 ÷ btrfs",
    "blog/reads-kept-btrfs": "Blogs read on btrfs, after ÷ before the snapshot",
    "blog/writes-kept-btrfs": "Blogs written on btrfs, after ÷ before the snapshot",
}
# The kernel's name for a stack of disks that do not turn is wrong here, and disks that turn have nothing to discard.
_INSIDE = f"""
set -eu
# Not from the disk's first block on, or LVM would find its mark on both devices.
dmsetup create spinning --uuid {_UUID} --table "0 $(($(blockdev --getsz /dev/ubda) - 2048)) linear /dev/ubda 2048"
turns=$1; shift
for queue in /sys/block/ubda/queue /sys/block/dm-0/queue; do
  echo $turns >$queue/rotational
  echo 0 >$queue/discard_max_bytes
done
exec "$@"
"""


class Named(Protocol):
    """An experiment; its results are in a folder of that name."""

    @property
    def name(self) -> str:
        """Its name."""


@dataclass(frozen=True, kw_only=True)
class Repetition:
    """One experiment in one variant."""

    name: str
    scenario: str
    variant: str
    profile: str = "quick"
    size_bytes: int = _DATA_BYTES
    budget_s: int = _GUEST_S
    seed: int = 1
    stacks: tuple[str, ...] = _STACKS

    def command(self, results: Path, repeats: int) -> list[str]:
        """Return what is run in the guest."""
        return [
            *(str(_ROOT / ".venv/bin/snapmgr"), "bench", "run", self.scenario),
            *("--variant", self.variant, "--profile", self.profile, "--size", str(self.size_bytes)),
            *("--on", _DISK, "--stacks", ",".join(self.stacks), "--repeats", str(repeats)),
            *("--budget", f"{self.budget_s}s", "--seed", str(self.seed), "-o", str(results)),
        ]


REPETITIONS = (
    Repetition(name="repaired", scenario="random-update", variant="repaired"),
    # Once more, at other places: six pairs leave wide intervals for as many comparisons as the page makes.
    Repetition(name="repaired-again", scenario="random-update", variant="repaired", seed=2),
    Repetition(name="printed", scenario="random-update", variant="printed"),
    Repetition(name="database", scenario="random-update", variant="database"),
    # 12 intervals of 5 s on a tree that does not fit into memory.
    Repetition(name="blog", scenario="blog", variant="repaired", profile="standard", size_bytes=_DATA_BYTES),
    Repetition(name="blog-printed", scenario="blog", variant="printed", profile="standard", size_bytes=_DATA_BYTES),
    # What a second load alone does. Two runs, so that two guests can share the work: give each some --repeats.
    *(
        Repetition(name=name, scenario="blog", variant="repaired", profile="standard", stacks=(_CONTROL,), seed=number)
        for number, name in enumerate(("blog-control", "blog-control-again"), start=1)
    ),
)


def measure(one: Repetition, keep: Path, repeats: int, *, plain: Path | None = None) -> int:
    """Run one in a guest of its own, on a disk of its own, to its end; return the exit code.

    The disk is an emulated one; with `plain` it is a file in that folder, and as quick as what it lies on.
    """
    with work_folder(plain or Path("/dev/shm")) as folder:
        disk = folder / "disk"
        with disk.open("wb") as file:
            if plain:
                os.posix_fallocate(file.fileno(), 0, _DISK_BYTES)
            file.truncate(_DISK_BYTES)
        emulated = () if plain else ("--preload", str(disk_library()))
        guest = [
            *(str(_ROOT / "vagrant/uml.py"), "--name", f"the guest for {one.name}", "--time-limit", str(_GUEST_S)),
            *("--memory", f"{_MEMORY_MIB}M", "--keep", str(keep), "--disk", str(disk)),
            *(*emulated, "--", "sh", "-c", _INSIDE, "sh", "0" if plain else "1"),
        ]
        guest += one.command(keep / one.name, repeats)
        environment = os.environ | ({} if plain else preloading(disk))
        return subprocess.run(guest, stdin=subprocess.DEVNULL, check=False, env=environment).returncode


def blocks(folder: Path, stacks: int = len(_STACKS)) -> tuple[int, list[float]]:
    """Return how many blocks hold each of so many storages once, without a failure, and how long each sample took."""
    samples = [one for one in Results(folder).samples() if one["kind"] != "absent"] if folder.is_dir() else []
    good = Counter(one["block"] for one in samples if one["kind"] == "measured" and not one["failure"])
    return sum(1 for number in good.values() if number == stacks), [one["seconds"] for one in samples]


def show(chosen: Sequence[Repetition], keep: Path, repeats: int) -> None:
    """Print what is there and what is missing."""
    for one in chosen:
        # The pilot; in each block one storage twice.
        whole = len(one.stacks) + repeats * (len(one.stacks) + 1)
        have, seconds = blocks(keep / one.name, len(one.stacks))
        left_s = max(whole - len(seconds), 0) * (median(seconds) if seconds else _GUESS_S)
        print(f"{one.name:14}{have} of {repeats} blocks, {len(seconds)} samples, about {format_duration(left_s)} left")


def pack(chosen: Sequence[Named], keep: Path, file: Path) -> None:
    """Write the samples into one archive, the same bytes for the same samples."""
    with tarfile.open(file, "w:xz", preset=9) as archive:
        for path in sorted(path for one in chosen for path in (keep / one.name).glob("*.json")):
            data = path.read_bytes()
            entry = tarfile.TarInfo(str(path.relative_to(keep)))
            entry.size, entry.mode = len(data), 0o444
            archive.addfile(entry, io.BytesIO(data))
    found = read([keep / one.name for one in chosen if (keep / one.name).is_dir()])
    print(f"{len(found.samples)} samples, {file.stat().st_size} bytes: {file}")


def unpack(archive: Path, keep: Path) -> None:
    """Write the samples of an archive that `pack` has made to `keep`, where a run goes on with them."""
    with tarfile.open(archive) as file:
        for entry in file:
            if (member := file.extractfile(entry)) is not None:
                path = keep / entry.name
                path.parent.mkdir(exist_ok=True)
                # As they were: what is there already is never written again.
                with path.open("xb") as sample:
                    sample.write(member.read())
                path.chmod(0o444)


def unpacked(archive: Path) -> list[dict[str, Any]]:
    """Return the samples of an archive."""
    with work_folder() as folder:
        unpack(archive, folder)
        found = read(sorted(folder.iterdir()))
    if found.problems:
        raise RuntimeError("\n".join(found.problems))
    return found.samples


def report(samples: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]] = ()) -> list[str]:
    """Return the table in Markdown: what was published, what was found, with intervals and the number of repeats.

    `plain` are samples of a guest whose disk was a file.
    """
    lines = [
        "| Experiment | Figure | Published | On the emulated disk (95 %) | On a file (95 %) | The conclusion |",
        "|---|---|---|---|---|---|",
    ]
    beside = {(row["experiment"], row["key"]): _ours(row) for row in compare_published(plain)["rows"]}
    for row in compare_published(samples)["rows"]:
        if row["experiment"]:
            cells = [row["experiment"], row["title"], row["published_text"], _ours(row)]
            cells += [beside.get((row["experiment"], row["key"]), "–"), f"**{row['verdict']}**: {row['words']}"]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _ours(row: dict[str, Any]) -> str:
    ours = row["ours"]
    return f"{row['ours_text']}, n = {ours['n']}" if ours else str(row["ours_text"])


def chart(samples: Sequence[dict[str, Any]]) -> str:
    """Return a picture that stands alone: each published ratio of `repaired` above ours, on one scale."""
    drawn = []
    for row in compare_published(samples)["rows"]:
        ours, (low, high) = row["ours"], row["published"] or (0, 0)
        if not ours or row["key"] not in _DRAWN or not row["experiment"].endswith("repaired"):
            continue
        kind: Kind = {"holds": "better", "does not hold": "worse"}.get(row["verdict"], "same")  # type: ignore[assignment]
        here = RatioRow(
            label="here", value=ours["value"], low=ours["low"], high=ours["high"], text=ours["text"], kind=kind
        )
        text = f"{math.sqrt(low * high):.2f}"
        there = RatioRow(label="published", value=math.sqrt(low * high), low=low, high=high, text=text, kind="other")
        title = f"{_DRAWN[row['key']]}: {row['verdict']}"
        drawn.append(RatioGroup(title=title, better="neither", rows=[there, here]))
    svg = ratio_chart(
        drawn,
        width=WIDE,
        title="The published ratios of LVM + ext4 to btrfs, and ours",
        description="Each with its interval of 95 % on a logarithmic scale; the first table has the same figures.",
        ident="published",
    )
    css = resources.files("snapmgr.bench.report").joinpath("page.css").read_text(encoding="utf-8")
    style = css[: css.index("* {")] + "".join(f"{line}\n" for line in css.splitlines() if line.startswith("svg "))
    head, tag, rest = svg.partition(">")
    return f"{head}{tag}<style>\n{style}svg {{ background: var(--paper); }}\n</style>{rest}\n"


def _with_files(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a sample of the blogs, which was made when there was only the curve of it, with the count of files."""
    infos = {info.name: info for info in blog.metrics if info.name.startswith("files_written_")}
    if sample["scenario"] != blog.name or not sample["series"] or infos.keys() <= sample["infos"].keys():
        return sample
    series = sample["series"]
    counts = {
        f"files_written_{moment}": sum(sum(series[curve.replace("*", moment)]) for curve in STALLS[0].curves)
        for moment in ("before", "after")
    }
    added = {name: asdict(info) for name, info in infos.items()}
    return sample | {"metrics": sample["metrics"] | counts, "infos": sample["infos"] | added}


def figures(samples: Sequence[dict[str, Any]]) -> list[str]:
    """Return the medians of each storage in Markdown."""
    lines = ["| Experiment | Figure | LVM + ext4 | btrfs | ext4, no snapshot |", "|---|---|---|---|---|"]
    for group in groups([_with_files(sample) for sample in samples]):
        for name, info in group.samples[0]["infos"].items():
            values = [
                [one["metrics"][name] for one in group.counted if one["stack"] == stack and name in one["metrics"]]
                for stack in (*_STACKS, _CONTROL)
            ]
            if name in _FIGURES and all(values[: len(_STACKS)]):
                cells = [format_quantity(median(each), info["unit"]) if each else "–" for each in values]
                lines.append(f"| {group.name} | {info['title']} | {' | '.join(cells)} |")
    return lines


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(
        prog="./run measure published", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = ",".join(one.name for one in REPETITIONS)
    parser.add_argument("--keep", type=Path, default=_KEEP, help=f"folder of results (default: {_KEEP})")
    parser.add_argument("--only", default=names, help=f"default: {names}")
    parser.add_argument("--repeats", type=int, default=6, help="blocks of each (default: 6)")
    parser.add_argument(
        "--plain", type=Path, metavar="FOLDER", help="on a file in FOLDER, as quick as that is, in place of the disk"
    )
    parser.add_argument("--list", action="store_true", help="say what is missing, and measure nothing")
    parser.add_argument("--pack", type=Path, metavar="FILE", help="write the samples into an archive, measure nothing")
    parser.add_argument("--unpack", type=Path, metavar="FILE", help="begin with the samples of an archive")
    parser.add_argument("--chart", type=Path, metavar="FILE", help="print the picture of an archive, measure nothing")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        nargs="+",
        help="print the tables of an archive (and of one of --plain, as the second), measure nothing",
    )
    arguments = parser.parse_args()
    if arguments.report:
        samples, *plain = map(unpacked, arguments.report)
        print("\n".join([*report(samples, *plain), "", *figures(samples)]))
        return 0
    if arguments.chart:
        print(chart(unpacked(arguments.chart)), end="")
        return 0
    wanted = arguments.only.split(",")
    chosen = [one for one in REPETITIONS if one.name in wanted]
    if unknown := set(wanted) - {one.name for one in chosen}:
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {names}")
    arguments.keep.mkdir(parents=True, exist_ok=True)
    keep = arguments.keep.resolve()
    if arguments.unpack:
        unpack(arguments.unpack, keep)
    if arguments.pack:
        pack(chosen, keep, arguments.pack)
    elif arguments.list:
        show(chosen, keep, arguments.repeats)
    else:
        for one in chosen:
            code = measure(one, keep, arguments.repeats, plain=arguments.plain)
            if code:
                print(f"{one.name}: exit code {code}", file=sys.stderr)
                return code
        show(chosen, keep, arguments.repeats)
    return 0


if __name__ == "__main__":
    sys.exit(main())
