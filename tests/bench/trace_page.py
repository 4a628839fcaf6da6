"""The page of a large trace in a headless Chromium: its size, how long it takes to write and to open, and how it pans.

    PYTHONPATH=tests .venv/bin/python tests/bench/trace_page.py --operations 1000000 --json samples.json

The mouse drags the timeline to and fro, a frame for each step, in windows from the whole trace to a few thousand
operations. "between frames" is what a user sees: the time from one frame to the next while dragging; "script" is the
page's own part of each. Without a screen frames come every 16.7 ms at best. Needs chromium.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from snapmgr.contract.units import format_size
from snapmgr.trace.accesslog import Trace
from snapmgr.trace.page import write_page
from support.browser import Browser, browser
from support.operations import prepare_operations

# Before the page's own script: every callback of a frame is timed, and the times of frames are kept.
_WATCH = """
window.frames_ms = []; window.scripts_ms = [];
const plain = window.requestAnimationFrame.bind(window);
window.requestAnimationFrame = (act) => plain((at) => {
  const begin = performance.now();
  act(at);
  window.scripts_ms.push(performance.now() - begin);
});
let last = 0;
const tick = (at) => { if (last) window.frames_ms.push(at - last); last = at; plain(tick); };
plain(tick);
"""
_ZOOMS = (0, 2, 4, 6, 8, 10)
_STEPS = 90


def drag(page: Browser) -> None:
    """Drag the timeline to and fro, from one side to the other and back."""
    left, top, width = page.evaluate(
        "(({left, top, width}) => [left, top, width])(document.getElementById('timeline').getBoundingClientRect())"
    )
    at = [left + width * (0.5 + 0.4 * (1 - abs(2 * step / _STEPS - 1)) - 0.2) for step in range(_STEPS)]
    page.mouse("mousePressed", at[0], top + 40)
    for x in at:
        page.mouse("mouseMoved", x, top + 40, buttons=1)
    page.mouse("mouseReleased", at[-1], top + 40)


def summary(samples: list[float]) -> dict[str, float]:
    """Return median, 95th percentile and maximum."""
    ordered = sorted(samples)
    return {
        "median": statistics.median(ordered),
        "p95": ordered[min(int(0.95 * len(ordered)), len(ordered) - 1)],
        "max": ordered[-1],
        "samples": len(ordered),
    }


def row(name: str, found: dict[str, float]) -> str:
    """Return a line of the table."""
    return f"{name:<34}{found['median']:>9.1f}{found['p95']:>9.1f}{found['max']:>9.1f}{found['samples']:>9.0f}"


def main() -> None:
    """Measure, and print a table in milliseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--width", type=int, default=1400)
    parser.add_argument("--json", type=Path, help="write what was measured")
    parser.add_argument("--keep", type=Path, help="keep the page here")
    options = parser.parse_args()
    operations = prepare_operations(options.operations)
    with tempfile.TemporaryDirectory(prefix="snapmgr-bench-") as folder:
        path = options.keep or Path(folder, "trace.html")
        begin = time.monotonic()
        with path.open("wb") as file:
            write_page(Trace(operations=operations), file, title="benchmark")
        written_s, size_bytes = time.monotonic() - begin, path.stat().st_size
        del operations
        with browser(Path(folder)) as page:
            page.resize(options.width, 900)
            page.call("Page.addScriptToEvaluateOnNewDocument", source=_WATCH)
            begin = time.monotonic()
            page.open(path.absolute())
            page.wait("document.getElementById('window').textContent")
            opened_s = time.monotonic() - begin
            pans = pan(page)
            heap_bytes = page.call("Runtime.getHeapUsage")["usedSize"]
            if complaints := page.complaints():
                sys.exit(f"the page complains: {complaints}")
    print(f"{options.operations:,} operations: page {format_size(size_bytes)}, written in {written_s:.1f} s")
    print(f"opened, with all tables: {opened_s:.1f} s; JavaScript heap {format_size(heap_bytes)}, columns beside it\n")
    print(f"{'panning, milliseconds':<34}{'median':>9}{'p95':>9}{'max':>9}{'frames':>9}")
    for each in pans:
        window = f"window of {each['window_us'] / 1e6:.4g} s"
        print(row(f"{window}: between frames", each["frames"]))
        print(row(f"{window}: script", each["scripts"]))
    if options.json:
        measured = {"size_bytes": size_bytes, "written_s": written_s, "opened_s": opened_s, "pans": pans}
        options.json.write_text(json.dumps({"operations": options.operations, **measured}, indent=1))


def pan(page: Browser) -> list[dict[str, Any]]:
    """Pan in each window; return what the frames took."""
    found: list[dict[str, Any]] = []
    page.evaluate("document.getElementById('timeline').focus()")
    for zooms in _ZOOMS:
        page.key("0")
        for _ in range(zooms):
            page.key("+")
        page.wait("new Promise((done) => setTimeout(() => done(true), 500))")
        page.evaluate("window.frames_ms.length = window.scripts_ms.length = 0")
        drag(page)
        frames, scripts = page.evaluate("[window.frames_ms, window.scripts_ms]")
        begin, end = page.evaluate("(({from, to}) => [+from, +to])(document.getElementById('timeline').dataset)")
        found.append({"window_us": end - begin, "frames": summary(frames), "scripts": summary(scripts)})
    return found


if __name__ == "__main__":
    main()
