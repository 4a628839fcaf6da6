"""The page of a trace in a real browser: it draws, moves, filters, and fits the screen."""

from __future__ import annotations

import gzip
import json
import re
from functools import cache
from pathlib import Path

import pytest

from snapmgr.trace.accesslog import Trace
from snapmgr.trace.analysis import analyse, facts_of
from snapmgr.trace.compare import Side
from snapmgr.trace.lanes import lanes, starts_us
from snapmgr.trace.page import write_comparison, write_page
from snapmgr.trace.verdict import Finding, Verdict, judge
from support.accesslog import read_blocks
from support.browser import browser
from support.operations import READER, WRITER, prepare_operations

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.timeout(240)]

GOLDEN = Path(__file__).parents[1] / "golden" / "trace"
NUMBER = 50_000
WIDE, NARROW = (1400, 900), (400, 800)
WHY = "Reads wait <b>until</b> pages are uploaded."


@cache
def operations():
    return prepare_operations(NUMBER)


@cache
def starts():
    """When each began: microseconds from the trace's start."""
    began = starts_us(operations())
    origin = min(began)
    return [each - origin for each in began]


@cache
def span():
    return max(start + us for start, us in zip(starts(), operations().duration_us, strict=True))


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    finding = Finding(bottleneck="upload", why=WHY, action="writeback", advice="Try a private mount with --writeback.")
    with (folder / "trace.html").open("wb") as file:
        write_page(Trace(operations=operations()), file, verdict=Verdict(findings=(finding,)), title="prepare.log.gz")
    with browser(folder) as found:
        found.prefer(prefers_color_scheme="light", prefers_reduced_motion="reduce")
        found.resize(*WIDE)
        found.open(folder / "trace.html")
        found.wait("document.getElementById('window').textContent")
        yield found


@pytest.fixture
def page(opened):
    """The page as it was at first; what it complained of fails the test."""
    opened.prefer(prefers_color_scheme="light", prefers_reduced_motion="reduce")
    opened.resize(*WIDE)
    # Away from everything, and nothing held.
    opened.mouse("mouseMoved", 1, 1)
    for name in ("reset", "whole"):
        opened.evaluate(f"document.getElementById('{name}').click()")
    opened.evaluate("scrollTo(0, 0)")
    opened.wait(f"document.getElementById('shown').textContent === 'all operations' && {_whole()}")
    # The tables follow last.
    opened.wait("document.getElementById('scope').textContent.includes(' 50,000 operations')")
    opened.evaluate("document.getElementById('timeline').focus()")
    opened.key("Escape")
    yield opened
    assert opened.complaints() == []


def _whole():
    window = "(({from, to}) => [from, to].join())(document.getElementById('timeline').dataset)"
    return f"{window} === '0,{span()}'"


def _window(page):
    frame = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    page.evaluate(frame)
    shown = page.evaluate("(({from, to}) => [Number(from), Number(to)])(document.getElementById('timeline').dataset)")
    assert 0 <= shown[0] < shown[1] <= span()
    return shown


def _box(page, name):
    box = f"document.getElementById('{name}').getBoundingClientRect()"
    return page.evaluate(f"(({{left, top, width, height}}) => [left, top, width, height])({box})")


def _text(page, name):
    return page.evaluate(f"document.getElementById('{name}').innerText")


def _table(page, name):
    rows = f"[...document.querySelectorAll('#{name} tbody tr')]"
    return page.evaluate(f"{rows}.map((row) => [...row.children].map((cell) => cell.innerText.trim()))")


def _settled(page, name, wanted):
    """Wait until a table's first column is what is wanted: tables follow the window a little later."""
    first = f"[...document.querySelectorAll('#{name} tbody tr :first-child')].map((cell) => cell.innerText.trim())"
    page.wait(f"JSON.stringify({first}) === JSON.stringify({json.dumps(wanted)})")


def _number(text):
    return int(text.replace(",", ""))


def test_it_asks_for_nothing_and_says_what_it_shows(page):
    asked_for = {address for address in page.requests() if not address.startswith("data:")}
    assert asked_for == {page.evaluate("location.href")}
    assert _text(page, "facts").startswith("50,000 operations of 3 threads in ")
    assert WHY in page.evaluate("document.querySelector('.verdict').innerText")
    assert page.evaluate("document.querySelectorAll('img, b').length") == 0, "what the log says became tags"


@pytest.mark.parametrize(("size", "touch"), [(WIDE, False), (NARROW, True)])
def test_nothing_is_wider_than_the_screen(page, size, touch):
    page.resize(*size, touch=touch)
    wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide == [size[0]] * 2
    left, _, width, height = _box(page, "timeline")
    assert left >= 0
    assert size[0] * 0.85 < width <= size[0]
    assert height >= 100
    small = page.evaluate(
        "[...document.querySelectorAll('button, input, select')].filter((each) => each.offsetParent)"
        ".filter((each) => { const box = each.getBoundingClientRect(); return box.left < 0 || box.height < 16 })"
        ".map((each) => each.outerHTML)"
    )
    assert small == []
    page.resize(*WIDE)


def test_the_sums_are_those_of_the_operations(page):
    rows = {row[0]: row for row in _table(page, "by-name")}
    for name in operations().names:
        code = operations().names.index(name)
        lasted = sorted(
            us for us, each in zip(operations().duration_us, operations().name, strict=True) if each == code
        )
        assert _number(rows[name][1]) == len(lasted)
        median, longest = (_microseconds(rows[name][column]) for column in (5, 8))
        # Percentiles come from bins of 1 %, and are shown with three digits.
        assert median == pytest.approx(lasted[(len(lasted) + 1) // 2 - 1], rel=0.015)
        assert longest == pytest.approx(lasted[-1], rel=0.01)
    threads = {row[0]: _number(row[1]) for row in _table(page, "by-thread")}
    assert threads[str(READER)] == sum(thread == READER for thread in operations().thread)
    assert _table(page, "longest")[0][1] == rows["fsync"][8]


def _microseconds(text):
    number, unit = text.split()
    return float(number) * {"µs": 1, "ms": 1000, "s": 1e6}[unit]


def test_keys_move_the_window(page):
    page.key("+")
    page.key("+")
    begin, end = _window(page)
    assert end - begin == pytest.approx(span() / 4)
    page.key("ArrowRight")
    assert _window(page)[0] == pytest.approx(begin + (end - begin) / 10)
    page.key("ArrowLeft", shift=True)
    assert _window(page)[0] == pytest.approx(begin - 0.4 * (end - begin))
    page.key("End")
    assert _window(page)[1] == pytest.approx(span())
    page.key("Home")
    assert _window(page)[0] == 0
    page.key("-")
    assert _window(page)[1] == pytest.approx(span() / 2)
    page.key("0")
    assert _window(page) == [0, span()]


def test_tables_follow_the_window(page):
    page.key("+")
    page.key("Home")
    page.wait("document.getElementById('window').textContent.includes('from 0.0')")
    half = span() / 2
    wanted = sum(start < half for start in starts())
    page.wait(f"document.getElementById('scope').textContent.includes(' {wanted:,} operations')")


def test_the_wheel_zooms_at_the_pointer_but_the_page_scrolls_until_it_was_clicked(page):
    left, top, width, _ = _box(page, "timeline")
    page.evaluate("document.activeElement.blur()")
    at = {"x": left + width / 4, "y": top + 30}
    page.mouse("mouseWheel", **at, deltaX=0, deltaY=120)
    page.wait("scrollY > 0")
    assert _window(page) == [0, span()]
    page.evaluate("scrollTo(0, 0)")
    page.mouse("mouseWheel", **at, deltaX=0, deltaY=-240, modifiers=2)
    begin, end = _window(page)
    assert end - begin < 0.6 * span()
    # What lies under the pointer stays there.
    assert begin + (end - begin) / 4 == pytest.approx(span() / 4, rel=0.01)
    page.evaluate("document.getElementById('timeline').focus()")
    page.mouse("mouseWheel", **at, deltaX=0, deltaY=240)
    assert _window(page) == pytest.approx([0, span()])


def test_the_mouse_drags_and_spans(page):
    left, top, width, _ = _box(page, "timeline")
    page.key("+")
    begin, end = _window(page)
    page.mouse("mousePressed", left + 600, top + 40)
    for x in (560, 500, 450):
        page.mouse("mouseMoved", left + x, top + 40, buttons=1)
    page.mouse("mouseReleased", left + 450, top + 40)
    moved = _window(page)
    assert moved[0] - begin == pytest.approx((end - begin) * 150 / width, rel=0.05)
    page.mouse("mousePressed", left + 100, top + 40, modifiers=8)
    page.mouse("mouseMoved", left + 200, top + 40, modifiers=8, buttons=1)
    page.mouse("mouseReleased", left + 300, top + 40, modifiers=8)
    begin, end = _window(page)
    assert end - begin == pytest.approx((moved[1] - moved[0]) * 200 / width, rel=0.05)


def test_fingers_drag_and_pinch(page):
    page.resize(*NARROW, touch=True)
    page.evaluate("document.getElementById('timeline').scrollIntoView({block: 'center'})")
    left, top, _, _ = _box(page, "timeline")
    y = top + 40

    def touch(kind, *xs):
        points = [{"x": left + x, "y": y, "id": number} for number, x in enumerate(xs)]
        page.call("Input.dispatchTouchEvent", type=kind, touchPoints=points)

    touch("touchStart", 150)
    touch("touchStart", 150, 200)
    for apart in (40, 60, 80, 100):
        touch("touchMove", 175 - apart, 175 + apart)
    touch("touchEnd")
    begin, end = _window(page)
    assert end - begin < span() / 2
    touch("touchStart", 250)
    for x in (230, 200, 150):
        touch("touchMove", x)
    touch("touchEnd")
    assert _window(page)[0] > begin
    page.resize(*WIDE)


def _at(row):
    """Return an operation's start and end, microseconds from the trace's start."""
    return starts()[row], starts()[row] + operations().duration_us[row]


def test_hovering_and_clicking_tell_the_operation_that_is_there(page):
    # The longest failed read: 40 pixels of the window will be its.
    failed = [row for row in range(NUMBER) if operations().status[row] and operations().thread[row] == READER]
    row = max(failed, key=operations().duration_us.__getitem__)
    begin, end = _at(row)
    page.evaluate(f"document.getElementById('least').value = {operations().duration_us[row] / 1000}")
    page.evaluate("document.getElementById('failed').click()")
    page.wait("document.getElementById('shown').textContent.startsWith('1 of')")
    page.key(".")
    page.key("Enter")
    shown = _window(page)
    assert shown[0] < begin < end < shown[1]
    assert end - begin == pytest.approx((shown[1] - shown[0]) / 10, rel=0.01)
    page.evaluate("document.getElementById('reset').click()")
    page.wait("document.getElementById('shown').textContent === 'all operations'")
    page.evaluate("scrollTo(0, 0)")
    left, top, width, _ = _box(page, "timeline")
    x = left + width * ((begin + end) / 2 - shown[0]) / (shown[1] - shown[0])
    # The reader was longest in operations: its lane is the first.
    assert lanes(operations())[0].thread == READER
    page.mouse("mouseMoved", x, top + 40)
    page.wait("!document.getElementById('hover').hidden")
    inode = operations().inode[row]
    name = operations().paths.get(inode)
    for told in (_text(page, "hover"), _click(page, x, top + 40)):
        assert re.match(r"read \d", told)
        assert (f"{name} (inode {inode})" if name else f"inode {inode}") in told
        assert f"16 KiB at offset {operations().offset[row]:,}, 0 B done" in told
        assert f"thread {READER}" in told
        assert f"from {begin / 1e6:.6f} s" in told
        assert "input/output error" in told


def _click(page, x, y):
    page.key("Escape")
    page.mouse("mousePressed", x, y)
    page.mouse("mouseReleased", x, y)
    return _text(page, "chosen")


def test_filters_by_operation_thread_file_and_latency(page):
    def shown(number):
        page.wait(f"document.getElementById('shown').textContent === '{number:,} of 50,000 operations'")

    def fill(name, value):
        page.evaluate(f"document.getElementById('{name}').value = {json.dumps(value)}")
        page.evaluate(f"document.getElementById('{name}').dispatchEvent(new Event('input'))")

    writes = operations().name.count(operations().names.index("write"))
    chips = "[...document.querySelectorAll('#chips button')]"
    page.evaluate(f"{chips}.find((chip) => chip.innerText.startsWith('write')).click()")
    shown(NUMBER - writes)
    assert page.evaluate("document.querySelectorAll('#chips [aria-pressed=false]').length") == 1
    page.evaluate("document.getElementById('reset').click()")
    page.wait("document.getElementById('shown').textContent === 'all operations'")
    fill("thread", str(WRITER))
    shown(operations().thread.count(WRITER))
    _settled(page, "by-thread", [str(WRITER)])
    fill("thread", "")
    fill("file", "</SCRIPT>")
    shown(operations().inode.count(1240))
    _settled(page, "by-file", ['mysql/</script><b>"né".ibd (inode 1240)'])
    fill("file", "")
    fill("least", "20")
    shown(sum(us >= 20_000 for us in operations().duration_us))


def test_a_row_of_the_longest_leads_to_its_place_and_the_next_key_to_its_neighbour(page):
    page.evaluate("document.querySelector('#longest button').click()")
    row = max(range(NUMBER), key=operations().duration_us.__getitem__)
    begin, end = _at(row)
    assert _window(page) == pytest.approx([begin - 4.5 * (end - begin), end + 4.5 * (end - begin)], rel=0.01)
    assert f"from {begin / 1e6:.6f} s" in _text(page, "chosen")
    assert page.evaluate("document.activeElement.id") == "timeline"
    writer = next(lane.rows for lane in lanes(operations()) if lane.thread == WRITER)
    following = writer[writer.index(row) + 1]
    page.key(".")
    assert f"from {_at(following)[0] / 1e6:.6f} s" in _text(page, "chosen")


def test_dark_and_light(page):
    shots = {}
    for theme in ("light", "dark"):
        page.prefer(prefers_color_scheme=theme)
        page.wait(f"document.documentElement.dataset.theme === '{theme}'")
        shots[theme] = page.screenshot()
    assert shots["light"] != shots["dark"]
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
    page.key("t")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    # The picture has the theme's colours too, not the page alone.
    picture = "document.getElementById('timeline').toDataURL()"
    light = page.evaluate(picture)
    page.key("t")
    _window(page)
    assert page.evaluate(picture) != light


def test_help_opens_by_key_and_names_every_key(page):
    page.key("?")
    assert page.wait("document.getElementById('help').open")
    assert "previous operation" in _text(page, "help")
    page.call("Input.dispatchKeyEvent", type="rawKeyDown", key="Escape", windowsVirtualKeyCode=27)
    page.wait("!document.getElementById('help').open")


_ACTING = {"button", "combobox", "textbox", "searchbox", "checkbox", "spinbutton", "table", "application"}


def test_everything_that_acts_has_a_name_for_those_who_do_not_see_it(page):
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    acting = [node for node in nodes if node.get("role", {}).get("value") in _ACTING]
    assert len(acting) > 20
    assert len([node for node in acting if node["role"]["value"] == "table"]) == 4
    assert [node for node in acting if not node["name"]["value"]] == []


def test_a_damaged_page_says_so(opened, tmp_path):
    with (tmp_path / "trace.html").open("wb") as file:
        write_page(Trace(operations=prepare_operations(200)), file)
    whole = (tmp_path / "trace.html").read_text()
    (tmp_path / "damaged.html").write_text(re.sub(r'(id="data">.{400}).{40}', r"\1", whole))
    opened.open(tmp_path / "damaged.html")
    opened.wait("!document.getElementById('trouble').hidden")
    assert "cannot be shown" in _text(opened, "trouble")


def test_a_trace_without_operations_is_a_page_too(opened, tmp_path):
    with (tmp_path / "trace.html").open("wb") as file:
        write_page(Trace(), file)
    opened.events.clear()
    opened.open(tmp_path / "trace.html")
    opened.wait("document.getElementById('scope').textContent.includes('0 operations')")
    assert "no operation" in _text(opened, "facts")
    assert opened.complaints() == []


def test_missing_lines_are_hatched_and_told(opened, tmp_path):
    log = gzip.decompress((GOLDEN / "phases.log.gz").read_bytes()).splitlines(keepends=True)
    trace = read_blocks(log[: len(log) // 5] + log[len(log) * 4 // 5 :])
    analysis = analyse(trace)
    with (tmp_path / "trace.html").open("wb") as file:
        write_page(trace, file, analysis=analysis, verdict=judge(facts_of(trace, analysis)))
    opened.events.clear()
    opened.open(tmp_path / "trace.html")
    opened.wait("document.getElementById('scope').textContent.includes('operations')")
    assert "or lines are missing" in opened.evaluate("document.querySelector('.caveats').innerText")
    assert "there is no verdict" in opened.evaluate("document.querySelector('.verdict').innerText")
    assert "Hatched" in _text(opened, "keys-hint")
    # Reading pixels makes the browser complain.
    assert opened.complaints() == []
    (hole,) = analysis.holes
    share = ((hole.from_us + hole.to_us) / 2 - analysis.first_us) / (analysis.last_us - analysis.first_us)
    red = (
        "((canvas, share) => { const {width, height} = canvas;"
        "const data = canvas.getContext('2d').getImageData(width * share - 20, 0, 40, height).data;"
        "let count = 0; for (let i = 0; i < data.length; i += 4) count += data[i] > data[i + 1] + 30; return count; })"
    )
    for name in ("timeline", "overview"):
        canvas = f"document.getElementById('{name}')"
        hatched, plain = (opened.evaluate(f"{red}({canvas}, {at})") for at in (share, 0.25))
        assert hatched > 100 > plain, name


def test_a_comparison_has_both_timelines_on_one_axis(opened, tmp_path):
    def side(log):
        trace = read_blocks(log)
        analysis = analyse(trace)
        return Side(trace=trace, analysis=analysis, verdict=judge(facts_of(trace, analysis)))

    log = gzip.decompress((GOLDEN / "phases.log.gz").read_bytes()).splitlines(keepends=True)
    with (tmp_path / "change.html").open("wb") as file:
        write_comparison(side(log), side(log[: len(log) // 2]), file, title="before and after")
    opened.events.clear()
    opened.resize(*NARROW, touch=True)
    opened.open(tmp_path / "change.html")
    opened.wait("document.getElementById('scope').textContent.includes('operations')")
    assert opened.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [NARROW[0]] * 2
    assert {row[0][:1] for row in _table(opened, "by-thread")} == {"A", "B"}
    assert {row[0][:2] for row in _table(opened, "by-file")} <= {"A:", "B:", "no"}
    assert "times as fast" in opened.evaluate("document.querySelector('.verdict').innerText")
    opened.evaluate("document.querySelector('details').open = true")
    assert _table(opened, "measures")[0][0] == "length"
    assert opened.evaluate("document.documentElement.scrollWidth") == NARROW[0]
    assert opened.complaints() == []
    opened.resize(*WIDE)


def test_requests_to_the_object_store_and_staged_data_are_strips_above_the_threads(opened, tmp_path):
    trace = read_blocks(gzip.decompress((GOLDEN / "phases.log.gz").read_bytes()).splitlines(keepends=True))
    begin = analyse(trace).first_us
    fields = ("at_us", "gets", "get_bytes", "puts", "put_bytes", "staged_blocks", "staged_bytes")
    rows = (
        (begin, 0, 0, 0, 0, 0, 0),
        (begin + 500_000, 5, 1 << 20, 0, 0, 0, 0),
        (begin + 10**6, 9, 2 << 20, 3, 99, 1, 7),
    )
    trace.trailer = {
        "samples": [dict(zip(fields, row, strict=True)) for row in (*rows, (begin + 15 * 10**5, *rows[2][1:]))]
    }
    with (tmp_path / "trace.html").open("wb") as file:
        write_page(trace, file)
    opened.open(tmp_path / "trace.html")
    opened.wait("document.getElementById('scope').textContent.includes('operations')")
    left, _, width, height = _box(opened, "objects")
    assert (left, width, height) == (*_box(opened, "timeline")[::2], 3 * 46)
    with (tmp_path / "plain.html").open("wb") as file:
        write_page(Trace(operations=trace.operations), file)
    opened.open(tmp_path / "plain.html")
    opened.wait("document.getElementById('scope').textContent.includes('operations')")
    assert _box(opened, "objects")[3] == 0
