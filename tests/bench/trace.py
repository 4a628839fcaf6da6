"""How fast logs of operations are read, beside a plain read of the same file; and what recording costs a program.

    PYTHONPATH=tests .venv/bin/python tests/bench/trace.py [--log FILE] [--repeats 7] [--pairs 7]

The log is made up in the form and the mix of a prepare's (--lines of them) unless --log names one. The program whose
operations are recorded reads from a JuiceFS mount what the client has in its cache, past the page cache: so it waits
for nothing but the client. Interleaved; medians, with the least and the most.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from snapmgr.trace.analysis import analyse
from snapmgr.trace.reading import read_trace
from support.juicefs import juicefs_volume

if TYPE_CHECKING:
    from collections.abc import Callable

_SNAPMGR = Path(sys.executable).with_name("snapmgr")
_FILE_BYTES = 32 << 20
_READ_BYTES = 4096


def make_log(path: Path, count: int) -> None:
    """Write a log like a prepare's: 48 % reads, 46 % writes, some getattr, few of the rest."""
    choose = random.Random(1)
    kinds = ("read", "write", "getattr", "lookup", "fsync")
    with path.open("w", encoding="ascii") as out:
        for number in range(count):
            second, micro = divmod(number * 416, 1_000_000)
            front = f"2026.11.21 {8 + second // 3600:02}:{second // 60 % 60:02}:{second % 60:02}.{micro:06}"
            inode, offset = 1000 + choose.randrange(80), 16384 * choose.randrange(100_000)
            kind = choose.choices(kinds, (48, 46, 4, 1.7, 0.3))[0]
            what = {
                "read": f"read ({inode},16384,{offset},45): (16384) - OK",
                "write": f"write ({inode},16384,{offset},52) - OK",
                "getattr": f"getattr ({inode}): ({inode},[-rw-r-----:0100640,1,0,0,1795304878,1795304878,1,4096]) - OK",
                "lookup": f"lookup (2,t{inode}.ibd): ({inode},[-rw-r-----:0100640,1,0,0,1795304878,1,1,4096]) - OK",
                "fsync": f"fsync ({inode},1) - OK",
            }[kind]
            thread = 9448 if kind in {"write", "fsync"} else 9445
            out.write(f"{front} [uid:0,gid:0,pid:{thread}] {what} <0.{choose.randrange(20_000):06}>\n")


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Return elapsed seconds, and seconds of processor."""
    cpu_s, start_s = time.process_time(), time.monotonic()
    work()
    return time.monotonic() - start_s, time.process_time() - cpu_s


def show(name: str, values: list[float], unit: str) -> None:
    """Print a median and its spread."""
    print(f"{name:<28} {statistics.median(values):>12,.2f} {unit}   ({min(values):,.2f} to {max(values):,.2f})")


def bench_reader(log: Path, repeats: int) -> None:
    """Print how fast a log is read and added up."""
    trace = read_trace(str(log))
    count = len(trace.operations) + trace.operations.skipped
    print(f"{log.name}: {count:,} lines, {log.stat().st_size / 1e6:.1f} MB, {repeats} repeats")
    reader: dict[str, list[float]] = {"plain": [], "read": [], "read_cpu": [], "analyse": []}
    for _ in range(repeats):
        reader["plain"].append(count / seconds(log.read_bytes)[0] / 1000)
        elapsed_s, cpu_s = seconds(lambda: read_trace(str(log)))
        reader["read"].append(count / elapsed_s / 1000)
        reader["read_cpu"].append(count / cpu_s / 1000)
        reader["analyse"].append(count / seconds(lambda: analyse(trace))[1] / 1000)
    show("plain read", reader["plain"], "thousand lines/s")
    show("into columns", reader["read"], "thousand lines/s")
    show("  by processor time", reader["read_cpu"], "thousand lines/s")
    show("adding up, processor time", reader["analyse"], "thousand lines/s")


def read_past_the_page_cache(path: Path, count: int) -> None:
    """Read `count` random pieces of a file, each by a request to the client."""
    choose = random.Random(2)
    buffer = mmap.mmap(-1, _READ_BYTES)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        for _ in range(count):
            os.preadv(fd, [buffer], choose.randrange(_FILE_BYTES // _READ_BYTES) * _READ_BYTES)
    finally:
        os.close(fd)


def processor_s(pid: int) -> float:
    """Return how long a process has used a processor."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def bench_recording(pairs: int, reads: int) -> None:
    """Print how long a program takes with and without being recorded."""
    took: dict[str, list[float]] = {"without": [], "with": [], "recorder": [], "client without": [], "client with": []}
    with juicefs_volume(base=Path("/dev/shm")) as volume, tempfile.TemporaryDirectory() as folder:
        path = volume.point / "data"
        path.write_bytes(os.urandom(_FILE_BYTES))
        read_past_the_page_cache(path, reads)
        cpu = "juicefs_process_cpu_seconds_total"
        for number in range(pairs):
            before_s = volume.counter(cpu)
            took["without"].append(seconds(lambda: read_past_the_page_cache(path, reads))[0])
            took["client without"].append(volume.counter(cpu) - before_s)
            log = Path(folder) / f"{number}.gz"
            argv = [str(_SNAPMGR), "--quiet", "trace", "record", str(volume.point), "-o", str(log)]
            with subprocess.Popen(argv, stdout=subprocess.DEVNULL) as recorder:
                # Its header is written when it reads.
                while not log.exists() or log.stat().st_size == 0:
                    time.sleep(0.05)
                before_s, before_recorder_s = volume.counter(cpu), processor_s(recorder.pid)
                took["with"].append(seconds(lambda: read_past_the_page_cache(path, reads))[0])
                # It reads up to a second later.
                time.sleep(1.5)
                took["client with"].append(volume.counter(cpu) - before_s)
                took["recorder"].append(processor_s(recorder.pid) - before_recorder_s)
                recorder.terminate()
            missing = analyse(read_trace(str(log))).missing
            if missing:
                print(f"pair {number}: missing {missing}")
    print(f"recording: {reads:,} cached reads of {_READ_BYTES} bytes, {pairs} pairs")
    show("not recorded", took["without"], "s")
    show("recorded", took["with"], "s")
    show("client, not recorded", took["client without"], "s of processor")
    show("client, recorded", took["client with"], "s of processor")
    show("recorder", took["recorder"], "s of processor")
    show("ratio in each pair", [a / b for a, b in zip(took["with"], took["without"], strict=True)], "×")


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--lines", type=int, default=500_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--reads", type=int, default=30_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = arguments.log or Path(folder) / "made-up.log"
        if arguments.log is None:
            make_log(log, arguments.lines)
        bench_reader(log, arguments.repeats)
    bench_recording(arguments.pairs, arguments.reads)


if __name__ == "__main__":
    main()
