"""The page as a person uses it, in a headless Chromium."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hlo_analysis.diff import compare_analyses
from hlo_analysis.records import Comparison
from hlo_analysis.report import render_html
from tests.report.browser import Browser, Page
from tests.report.examples import HOSTILE


@pytest.fixture
def page(browser: Browser, page_file: Path) -> Page:
    return Page(browser, page_file)


def test_it_loads_from_a_file_with_no_complaint_and_no_request(page: Page, page_file: Path, comparison: Comparison):
    assert page.complaints() == []
    assert [url for url in page.requests() if not url.startswith("data:")] == [page_file.resolve().as_uri()]
    assert page.text("h1").startswith("6.95 → 5.40 ms (estimated, −22%) with xla_cudnn")
    assert page.count("table.strategies tbody tr") == len(comparison.strategies)
    assert page.count("table.scopes tbody tr") == len(comparison.rows)


@pytest.mark.parametrize("width", [400, 820, 1400])
@pytest.mark.parametrize("which", ["page_file", "hostile_file"])
def test_nothing_hangs_over_the_side(browser: Browser, request: pytest.FixtureRequest, which: str, width: int):
    page = Page(browser, request.getfixturevalue(which), width=width)
    page.run("document.querySelectorAll('details').forEach((it) => { it.open = true; })")
    page.click("#unfold-all")
    assert page.run("document.documentElement.scrollWidth") <= width
    page.click("#launch-table tbody button")
    assert page.run("document.getElementById('card').scrollWidth") <= width


def test_hostile_names_are_only_text(browser: Browser, hostile_file: Path):
    page = Page(browser, hostile_file)
    page.run("document.querySelectorAll('details').forEach((it) => { it.open = true; })")
    page.click("#unfold-all")
    page.write("#search", HOSTILE[:9])
    assert page.count("#found a") > 3
    page.press("Escape")
    page.click("#launch-table tbody button")
    page.run("document.querySelectorAll('#card details').forEach((it) => { it.open = true; })")
    page.wait("document.querySelectorAll('#card .hlo pre').length === 1")
    assert page.count("img") == 0
    assert page.count("script") == 3
    assert page.run("document.title") == f"{HOSTILE} · xlafuse"
    assert page.text("#card h2") == HOSTILE
    assert page.run("document.querySelector('#card .hlo pre').textContent").endswith(HOSTILE)
    assert page.complaints() == []


def test_search_filters_the_decisions(page: Page, comparison: Comparison):
    edges = [edge for edge in comparison["xla"].analysis.decisions if edge.verdict != "fused"]  # type: ignore[union-attr]
    wanted = [edge for edge in edges if "softmax_fusion" in (edge.producer, edge.consumer)]
    assert 0 < len(wanted) < len(edges)
    page.run("document.querySelectorAll('#decision-groups details').forEach((it) => { it.open = true; })")
    page.wait(f"document.querySelectorAll('#decision-groups tbody tr').length === {len(edges)}")
    page.write("#decision-search", "SOFTMAX_fusion")
    assert page.count("#decision-groups tbody tr") == len(wanted)
    assert page.text("#decision-count").startswith(f"{len(wanted)} edges of")
    page.write("#decision-search", "softmax_fusion nosuchword")
    assert page.count("#decision-groups tbody tr") == 0
    assert page.text("#decision-groups") == "No edge matches."


def test_the_verdict_filter_shows_fused_edges(page: Page, comparison: Comparison):
    decisions = comparison["xla"].analysis.decisions  # type: ignore[union-attr]
    fused = sum(edge.verdict == "fused" for edge in decisions)
    page.click("input[name=verdict][value=fused]")
    assert page.text("#decision-count") == f"{fused} edges of {len(decisions)}"
    page.click("input[name=verdict][value=all]")
    assert page.text("#decision-count") == f"{len(decisions)} edges of {len(decisions)}"


def test_scopes_of_the_graph_open_and_close(page: Page):
    clusters = page.count("#graph-view .cluster")
    assert clusters == 9
    assert page.count("#graph-view .node") == 0
    attention = "#graph-view .head[aria-label^='block/attention (']"
    page.click(attention)
    assert page.count("#graph-view .node") == 3
    assert page.run(f'document.querySelector("{attention}").getAttribute("aria-expanded")') == "true"
    assert page.run("document.activeElement.getAttribute('aria-label')").startswith("block/attention (forward)")
    page.press("Enter")
    assert page.count("#graph-view .node") == 0
    page.click("#unfold-all")
    assert page.count("#graph-view .node") == 13
    page.click("#fold-all")
    assert page.count("#graph-view .node") == 0


def test_a_single_box_of_the_graph_is_open(browser: Browser, comparison: Comparison, tmp_path: Path):
    result = comparison.strategies[0]
    assert result.analysis is not None
    launches = tuple(replace(launch, scope="", scopes=(), phase="forward") for launch in result.analysis.launches)
    nameless = replace(result, analysis=replace(result.analysis, launches=launches))
    file = tmp_path / "report.html"
    file.write_text(render_html(compare_analyses("f", (nameless,), nameless.name)), encoding="utf-8")
    page = Page(browser, file)
    assert (page.count("#graph-view .cluster"), page.count("#graph-view .node")) == (1, len(launches))


def test_boxes_of_the_graph_do_not_overlap(page: Page):
    page.click("#unfold-all")
    boxes = page.run(
        "[...document.querySelectorAll('#graph-view .frame')].map((it) => it.getBoundingClientRect())"
        ".map((b) => [b.left, b.top, b.right, b.bottom])"
    )
    for number, (left, top, right, bottom) in enumerate(boxes):
        for other in boxes[number + 1 :]:
            assert right <= other[0] or other[2] <= left or bottom <= other[1] or other[3] <= top


def test_differences_are_against_the_strategy_in_view(page: Page):
    launches = "table.strategies tr[data-strategy={}] [data-metric=launches] .d"
    assert page.text(launches.format("unfused")) == "+19"
    assert page.text(launches.format("xla")) == "baseline"
    page.choose("#focus", "unfused")
    assert page.text(launches.format("unfused")) == "baseline"
    assert page.text(launches.format("xla")) == "−19"
    assert page.text("#strategies .focus-name") == "unfused"


def test_the_strategy_in_view_changes_what_is_listed(page: Page):
    assert page.count("#launch-table tbody tr") == 13
    page.choose("#focus", "pallas")
    assert page.count("#launch-table tbody tr") == 11
    assert "rms_norm" in page.text("#launch-table tbody tr[data-row='0']")
    assert page.text("#graph .focus-name") == "pallas"


def test_the_card_tells_a_launch_and_closes(page: Page):
    page.click("button.mark[data-strategy=xla][data-launch='5']")
    assert page.run("document.getElementById('card').open") is True
    said = page.text("#card")
    for word in ("softmax_fusion", "triton", "bf16[2,32,4096,4096]", "897 µs, bound by memory", "block.py:114"):
        assert word in said
    assert page.count("#card .hlo pre") == 0
    page.click("#card .hlo summary")
    page.wait("document.querySelectorAll('#card .hlo pre').length === 1")
    assert "ROOT exponential" in page.text("#card .hlo pre")
    page.press("Escape")
    page.wait("!document.getElementById('card').open")


def test_raw_hlo_is_made_when_it_is_opened(page: Page):
    assert page.count("#raw-list details") == 0
    page.click("#raw > summary")
    page.wait("document.querySelectorAll('#raw-list details').length === 13")
    assert page.count("#raw-list pre") == 0


def test_launches_sort_by_a_column(page: Page):
    page.click("#launch-table [data-sort=roofline]")
    rows = "[...document.querySelectorAll('#launch-table tbody tr td:nth-child({0})')].map((it) => {1})"
    place = page.run("document.querySelector('#launch-table [data-sort=roofline]').parentElement.cellIndex") + 1
    shown = page.run(rows.format(place, "parseFloat(it.firstChild.textContent)"))
    assert len(shown) == 13
    assert shown == sorted(shown, reverse=True)
    head = f"#launch-table th:nth-child({place})"
    assert page.run(f"document.querySelector('{head}').getAttribute('aria-sort')") == "descending"
    page.click("#launch-table [data-sort=limiter]")  # the second line of the same column
    said = page.run(rows.format(place, "it.lastChild.textContent"))
    assert said == sorted(said, reverse=True)
    assert set(said) == {"memory", "compute"}


CONTRAST = """(selector) => {
  const pen = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const parse = (text) => { pen.clearRect(0, 0, 1, 1); pen.fillStyle = text; pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data]; };
  const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (rgb) => { const [r, g, b] = rgb.slice(0, 3).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const it = document.querySelector(selector);
  let under = it; let back;
  do { back = parse(getComputedStyle(under).backgroundColor); under = under.parentElement; }
  while (back[3] < 255 && under);
  const [a, b] = [light(parse(getComputedStyle(it).color)), light(back)];
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""
"""WCAG 2's contrast ratio of an element's text to what is behind it."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_light_and_dark(page: Page, scheme: str):
    page.prefer(scheme)
    for selector in (
        "h1",
        ".second",
        ".prose p",
        "table.strategies td.n .v",
        ".d.less",
        ".d.more",
        "button.link",
        ".how.counted",
        ".how.estimated",
        "table.scopes small",
        "thead th",
        ".verdict.rejected",
        ".verdict.ineligible",
        "td.soft",
    ):
        ratio = page.run(f"({CONTRAST})({selector!r})")
        assert ratio >= 4.5, f"{selector}: contrast {ratio:.2f} in {scheme}"
