"""The benchmark's report in a real browser: it fits the screen, can be read in the dark, by keyboard and on paper."""

from __future__ import annotations

import base64
import re
import zlib
from datetime import UTC, datetime
from struct import unpack

import pytest

from snapmgr.bench.report import document, render
from support.bench.samples import absent, blogs, random_updates, sample
from support.browser import browser

pytestmark = [pytest.mark.needs("chromium"), pytest.mark.timeout(240)]

WIDE, NARROW = (1400, 900), (400, 800)
NOW = datetime(2026, 11, 22, 3, 0, tzinfo=UTC)


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    failed = sample(7777, "random-update", "btrfs", variant="database", block=99, failure="no room " + "x" * 300)
    missing = absent("random-update", "juicefs", "redis-server is not installed (apt install redis-server)")
    found = document([*random_updates(), *blogs(), missing, failed], made_at=NOW)
    (folder / "report.html").write_text(render(found), encoding="utf-8")
    with browser(folder) as started:
        started.prefer(prefers_color_scheme="light")
        started.resize(*WIDE)
        started.open(folder / "report.html")
        yield started


@pytest.fixture
def page(opened):
    """The page as it was at first; what it complained of fails the test."""
    opened.prefer(prefers_color_scheme="light")
    opened.resize(*WIDE)
    opened.evaluate("document.querySelectorAll('details').forEach((each) => each.removeAttribute('open'))")
    opened.evaluate("history.replaceState(null, '', location.pathname); scrollTo(0, 0)")
    yield opened
    assert opened.complaints() == []
    asked_for = {address for address in opened.requests() if not address.startswith("data:")}
    assert asked_for == {opened.evaluate("location.href.split('#')[0]")}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_nothing_is_wider_than_the_screen_and_all_can_be_read(page, size, scheme):
    page.prefer(prefers_color_scheme=scheme)
    page.resize(*size, touch=size == NARROW)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true })")
    assert page.evaluate("[document.documentElement.scrollWidth, innerWidth]") == [size[0]] * 2
    # On a telephone tables are lists: nothing has to be pushed aside to be read, and each figure has its column's name.
    beyond = page.evaluate(
        "[...document.querySelectorAll('.scroll')].filter((e) => e.scrollWidth > e.clientWidth).length"
    )
    assert beyond == 0 or size == WIDE
    assert page.evaluate("[...document.querySelectorAll('tbody td')].filter((e) => !e.dataset.label).length") == 0
    # Of every chart that is shown: no text leaves its picture, and none is too small to read.
    cut = page.evaluate(
        "[...document.querySelectorAll('svg')].filter((each) => each.getBoundingClientRect().width).flatMap((svg) => {"
        " const frame = svg.getBoundingClientRect();"
        " return [...svg.querySelectorAll('text')].filter((each) => { const box = each.getBoundingClientRect();"
        "  return box.left < frame.left - 1 || box.right > frame.right + 1 || box.height < 9 })"
        " .map((each) => each.textContent) })"
    )
    assert cut == []
    shown = page.evaluate(
        "[...document.querySelectorAll('svg')].filter((each) => each.getBoundingClientRect().width).length"
    )
    assert shown == page.evaluate(
        "document.querySelectorAll('svg').length - document.querySelectorAll('.narrow svg').length"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_texts_stand_out_from_what_is_behind_them(page, scheme):
    page.prefer(prefers_color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true })")
    faint = page.evaluate(
        """(() => {
          const parts = (text) => text.match(/[\\d.]+/g).map(Number);
          const power = (part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
          const channel = (value) => power(value / 255);
          const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
          const behind = (each) => { for (let at = each; at; at = at.parentElement) {
            const colour = parts(getComputedStyle(at).backgroundColor);
            if (colour.length === 3 || colour[3] === 1) return colour } };
          const found = [];
          const texts = 'p, h1, h2, h3, h4, li, a, th, td, dt, dd, summary, pre, figcaption, caption, svg text';
          for (const each of document.querySelectorAll(texts)) {
            if (!each.textContent.trim() || !each.getBoundingClientRect().width) continue;
            const style = getComputedStyle(each);
            const ink = light(parts(each.closest('svg') ? style.fill : style.color)), paper = light(behind(each));
            const contrast = (Math.max(ink, paper) + 0.05) / (Math.min(ink, paper) + 0.05);
            if (contrast < 4.5) found.push([each.tagName, each.textContent.trim().slice(0, 40), contrast.toFixed(2)]);
          }
          return found;
        })()"""
    )
    assert faint == []


def test_the_evidence_of_a_sentence_is_one_step_away(page):
    page.evaluate("document.querySelector('.evidence a').click()")
    page.wait("document.querySelector('tr:target') !== null")
    assert re.match(r"\w.* ÷ \w", page.evaluate("document.querySelector('tr:target th').innerText"))
    # Also where it is folded away.
    link = page.evaluate("document.querySelector('details tr[id]').id")
    page.evaluate(f"location.hash = '#{link}'")
    page.wait("document.querySelector('tr:target').getBoundingClientRect().height > 0")


def test_the_keyboard_reaches_all_that_can_be_opened_and_shows_where_it_is(page):
    page.call("Page.navigate", url=page.evaluate("location.href.split('#')[0]"))
    page.wait("document.readyState === 'complete'")
    page.key("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    assert page.evaluate("document.activeElement.getBoundingClientRect().left") >= 0
    page.evaluate("document.querySelector('summary').focus()")
    page.key("Tab")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    unreached = page.evaluate(
        "[...document.querySelectorAll('.scroll, pre')].filter((each) => each.tabIndex < 0).map((each) => each.tagName)"
    )
    assert unreached == []


def test_it_can_be_printed(page):
    data = base64.b64decode(page.call("Page.printToPDF", printBackground=False)["data"])
    assert data.startswith(b"%PDF")
    pages = len(re.findall(rb"/Type\s*/Page\b", data))
    assert 3 < pages < 40


def test_it_draws(page):
    """The picture is neither blank nor of one colour."""
    picture = page.screenshot()
    width, height = unpack(">II", picture[16:24])
    assert (width, height) == WIDE
    at, packed = 8, b""
    while at < len(picture):
        (length,) = unpack(">I", picture[at : at + 4])
        packed += picture[at + 8 : at + 8 + length] if picture[at + 4 : at + 8] == b"IDAT" else b""
        at += length + 12
    assert len(set(zlib.decompress(packed))) > 100
