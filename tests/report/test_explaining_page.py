"""What the page says of missed fusions, the roofline and the graph, by clicking: in a headless Chromium."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from hlo_analysis.diff import compare_analyses
from hlo_analysis.records import Launch
from hlo_analysis.report import redacted, render_html
from tests.report.browser import Browser, Page
from tests.report.examples import CODE, full_comparison


@pytest.fixture
def page(browser: Browser, full_file: Path) -> Page:
    return Page(browser, full_file)


def _numbers(page: Page, selector: str) -> list[float]:
    """Times shown, in microseconds."""
    texts = page.run(f"[...document.querySelectorAll({selector!r})].map((it) => it.textContent)")
    return [float(value) * {"µs": 1, "ms": 1000}[unit] for value, unit in (text.split() for text in texts)]


_CARDS = "#advice-list > li[data-places]"


def test_what_to_do_stands_under_the_verdict_verified_first(page: Page):
    assert page.complaints() == []
    assert page.count(_CARDS) == 5
    verified, failed, untried, vain, unknown = (page.text(f"{_CARDS}:nth-child({place})") for place in range(1, 6))
    for said in ("−1.73 ms", "% of the time", "−6.4 GB, −2 launches", "attention", "block.py:104", CODE):
        assert said in verified
    assert "Verified by compiling again with attention by xlafuse.fuse" in verified
    assert "100 µs" in untried
    assert "of the time, above need" in untried
    assert "Not verified: the program has a custom_jvp here" in failed
    assert "Tried: no gain (compiler option xla_gpu_experimental_fuse=true)" in vain
    assert "cuDNN" not in vain, "what was tried in vain is no advice"
    assert "A scatter adds 8192 rows into 2" in unknown
    assert "269 µsmeasured" in unknown.replace("\n", "")
    assert "1.50 ms at worst" in unknown


def test_a_card_is_a_remedy_with_the_lines_and_layers_that_it_mends(browser: Browser, tmp_path: Path):
    comparison = full_comparison()
    result = comparison["xla"]
    assert result.analysis is not None
    first, second, *_ = result.analysis.hotspots
    layers = tuple(replace(each, scope=f"model/blocks/{each.index % 2}/mlp") for each in result.analysis.launches)
    alike = (replace(first, kernel="k", options=()), replace(second, kernel="k", options=(), trial=first.trial))
    alike = tuple(replace(each, source=f"model.py:{place}") for place, each in enumerate(alike, start=1))
    lines = (("model.py:1", "y = x @ w  # <b>"),)
    analysis = replace(result.analysis, launches=layers, hotspots=alike, source_lines=lines)
    file = tmp_path / "report.html"
    alone = replace(comparison, strategies=(replace(result, analysis=analysis),), unfused=None, rows=())
    file.write_text(render_html(alone), encoding="utf-8")
    page = Page(browser, file)
    assert page.count(_CARDS) == 1
    for said in ("model.py:1", "model.py:2", "layers 0 and 1", "y = x @ w  # <b>"):
        assert said in page.text(_CARDS)
    page.write("#search", "@ w")
    assert "y = x @ w" in page.text("#found .match")


def test_a_card_is_linked_and_holds_its_values(browser: Browser, tmp_path: Path):
    comparison = full_comparison()
    result = comparison["xla"]
    assert result.analysis is not None
    many = tuple(
        replace(each, kernel=None, options=(), remedy=f"{place}")
        for place, each in enumerate(result.analysis.hotspots[:5] * 2)
    )
    twice = replace(result, analysis=replace(result.analysis, hotspots=many))
    file = tmp_path / "report.html"
    file.write_text(render_html(replace(comparison, strategies=(twice,), unfused=None, rows=())), encoding="utf-8")
    page = Page(browser, file)
    assert page.text("#advice-list .more") == "Show 2 more"
    page = Page(browser, file, fragment="#hotspot-9")
    assert page.run("document.querySelector('.target').dataset.places") == "9"
    page.run("location.hash = '#missed-1'")
    page.wait("document.querySelector('.values .target')")
    assert page.run("document.querySelector('.target').dataset.ranks").split()[0] == "1"
    assert page.run("document.querySelector('.target').offsetHeight") > 0


@pytest.mark.parametrize("motion", ["no-preference", "reduce"])
def test_sections_are_where_their_links_lead(browser: Browser, full_file: Path, motion: str):
    page = Page(browser, full_file, fragment="#graph")
    page.prefer(motion, "reduced-motion")
    assert 0 <= page.place("#graph h2")[1] < 300
    sections = page.run("[...document.querySelectorAll('header nav a')].map((it) => it.hash)")
    assert len(sections) == 9
    for section in sections[:-1]:  # the last is too short to reach the top
        page.click(f"header nav a[href='{section}']")
        assert 0 <= page.place(f"{section} h2")[1] < 200, section
        assert page.run("location.hash") == section


def test_the_fastest_strategy_has_code_and_long_code_wraps(browser: Browser, full_file: Path, tmp_path: Path):
    made = full_comparison()
    best = (
        "fn = xlafuse.fuse(block)\nstep = jax.jit(fn, compiler_options={"
        + "'xla_gpu_enable_triton_gemm': False, " * 9
        + "})"
    )
    strategies = tuple(replace(each, call=best) if each.name == "xla_cudnn" else each for each in made.strategies)
    file = tmp_path / "report.html"
    file.write_text(render_html(replace(made, strategies=strategies)), encoding="utf-8")
    page = Page(browser, file, width=420)
    assert page.text("#winning-code").startswith("import jax\nimport xlafuse\n")
    assert page.run("document.querySelector('#winning-code pre').scrollWidth <= innerWidth")
    for box in ("#winning-code pre", "#advice-list .code pre"):
        assert page.run(
            f"(({{scrollWidth, clientWidth}}) => scrollWidth <= clientWidth)(document.querySelector('{box}'))"
        )
    assert page.run("document.documentElement.scrollWidth") <= 420


def test_what_two_strategies_differ_in_is_a_column_of_the_scopes(page: Page):
    row = "table.scopes tr[data-scope='block/attention']"
    cells = page.run(f'[...document.querySelectorAll("{row} td[data-column]")].map((it) => ({{...it.dataset}}))')
    of = {each["column"]: each for each in cells}
    launches = int(of["xla"]["launches"]) - int(of["xla_cudnn"]["launches"])
    assert launches > 0
    assert f"−{launches} launch" in page.text(f"{row} .diff")
    page.choose("#other", "xla")
    page.wait(f'!document.querySelector("{row} .diff").offsetWidth')
    page.choose("#focus", "xla_cudnn")
    assert f"+{launches} launch" in page.text(f"{row} .diff")


def test_the_time_is_grouped_and_adds_up(page: Page):
    analysis = full_comparison()["xla"].analysis
    assert analysis is not None
    whole = sum(launch.run_us for launch in analysis.launches)
    for by in ("scope", "pass", "kind", "source", "layer"):
        page.choose("#times-by", by)
        times = _numbers(page, "#times-list summary .n:not(.share):not(.soft)")
        assert times == sorted(times, reverse=True)
        assert sum(times) == pytest.approx(whole, rel=0.02)
    page.choose("#times-by", "pass")
    assert page.text("#times-list .who") == "forward"
    page.click("#times-list summary")
    page.wait(f"document.querySelectorAll('#times-list .inner li').length === {len(analysis.launches)}")
    page.click("#times-list .inner button")
    assert page.run("document.getElementById('card').open") is True


def test_the_compilers_words_of_a_value_are_folded(browser: Browser, full_file: Path):
    page = Page(browser, full_file, fragment="#missed-3")
    card = ".values [data-ranks^='3']"
    said = page.text(card)
    assert "is a cuBLAS call: it takes in only what the library offers" in said, "plain words for the compiler's reason"
    assert "Triton GEMM fusions take" not in said
    page.click(f"{card} .words summary")
    assert "Triton GEMM fusions take" in page.text(card)


def test_the_ptx_of_a_launch_is_folded_and_unpacked_when_opened(page: Page):
    page.click("#scopes [data-launch='5'][data-strategy=xla]")
    assert page.count("#card .hlo pre") == 0
    page.click("#card .hlo:last-child summary")
    page.wait("document.querySelector('#card .hlo:last-child code')?.textContent")
    assert page.text("#card .hlo:last-child code") == ".visible .entry softmax_fusion()  // </script>"
    assert page.complaints() == []


def test_ptx_that_the_page_leaves_out_is_told_where_to_find(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hlo_analysis.report.payload.PTX_LIMIT", 0)
    (tmp_path / "report.html").write_text(render_html(full_comparison()), encoding="utf-8")
    page = Page(browser, tmp_path / "report.html")
    page.click("#scopes [data-launch='5'][data-strategy=xla]")
    page.click("#card .hlo:last-child summary")
    page.wait("document.querySelector('#card .hlo:last-child code')?.textContent")
    assert "xlafuse explain 5 --ptx --capture report.json:xla" in page.text("#card .hlo:last-child code")


def test_the_code_of_a_remedy_is_copied(page: Page):
    page.run("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    page.click("#advice-list .copy")
    page.wait("document.querySelector('#advice-list .copy').textContent === 'Copied'")
    assert page.run("window.copied") == CODE


def test_an_option_is_code_to_copy(browser: Browser, page_file: Path):
    page = Page(browser, page_file)
    shown = page.run("document.querySelector('#advice-list pre').textContent")
    assert shown == "jax.jit(f, compiler_options={'xla_gpu_experimental_fuse': 'true'})"
    assert "Verified" not in page.text("#advice-list")
    assert "Tried" not in page.text("#advice-list")


def test_the_launch_card_has_the_remedy_and_the_resources(page: Page):
    page.click("button.mark[data-strategy=xla][data-launch='4']")
    said = page.text("#card")
    assert CODE in said
    assert "Verified by compiling again" in said
    assert "38%, limited by registers" in said
    assert "Registers\n44\n" in said
    assert "Spills\n32 B\n" in said
    assert page.run("location.hash") == "#launch-4"
    page.press("Escape")
    page.wait("location.hash === ''")


def test_resources_and_measured_times_are_columns_where_they_are_known(browser: Browser, page: Page, page_file: Path):
    heads = {"registers", "spill", "shared", "occupancy", "occupancyLimiter", "measured"}
    shown = "[...document.querySelectorAll('#launch-table [data-sort]')].map((it) => it.dataset.sort)"
    assert heads <= set(page.run(shown))
    assert heads & set(Page(browser, page_file).run(shown)) == {"shared"}
    assert "38%" in page.text("#launch-table tbody tr[data-row='4']")


@pytest.mark.parametrize("width", [500, 1400])
def test_no_column_is_cut(browser: Browser, full_file: Path, width: int):
    page = Page(browser, full_file, width=width)
    page.run("document.querySelectorAll('details').forEach((it) => { it.open = true; })")
    page.wait("document.querySelectorAll('#decision-groups tbody tr').length > 5")
    page.click("#advice-list [data-launch]")
    cut = page.run(
        "[...document.querySelectorAll('.scroll')].filter((it) => it.scrollWidth > it.clientWidth + 1)"
        ".map((it) => it.getAttribute('aria-label') ?? it.parentElement.textContent.slice(0, 60))"
    )
    assert cut == []
    assert page.run("document.documentElement.scrollWidth") <= width


def test_the_roofline_has_a_point_for_each_launch_that_computes(page: Page):
    analysis = full_comparison()["xla"].analysis
    assert analysis is not None
    computing = [launch for launch in analysis.launches if launch.flops]
    assert page.count("#roofline-view .point") == len(computing)
    assert f"{len(analysis.launches) - len(computing)} launches without counted arithmetic" in page.text(
        "#roofline-note"
    )
    radius = {
        int(index): float(r)
        for index, r in page.run(
            "[...document.querySelectorAll('.point')].map((it) => [it.dataset.launch, it.getAttribute('r')])"
        )
    }
    times = {launch.index: launch.measured_us or 0 for launch in computing}
    assert sorted(radius, key=lambda index: radius[index]) == sorted(times, key=lambda index: times[index])
    names = page.run("document.querySelector('#roofline-view svg').textContent")
    assert "4.8 TB/s" in names
    assert "bf16: 989 TFLOP/s" in names
    # A point stands at its FLOP per byte, between the ticks of the axis.
    ticks = dict(
        page.run("[...document.querySelectorAll('.tick')].map((it) => [it.textContent, it.getAttribute('x')])")
    )
    hundred, thousand = float(ticks["100"]), float(ticks["1K"])
    launch = analysis.launches[10]
    intensity = launch.flops / (launch.bytes_read + launch.bytes_written)
    at = hundred + (thousand - hundred) * math.log10(intensity / 100)
    assert page.run("Number(document.querySelector(\".point[data-launch='10']\").getAttribute('cx'))") == pytest.approx(
        at, abs=0.3
    )


def test_a_point_of_the_roofline_tells_and_opens_its_launch(page: Page):
    page.run("document.getElementById('roofline').scrollIntoView({behavior: 'instant'})")
    x, y, width, height = page.place(".point[data-launch='10']")
    page.point(x + width / 2, y + height / 2)
    page.wait("!document.querySelector('.tip').hidden")
    assert page.text(".tip").startswith("#10 cublas-gemm.5: cublas, 2.34 ms (measured")
    page.click(".point[data-launch='10']")
    assert page.text("#card h2") == "cublas-gemm.5"
    page.press("Escape")
    page.run("document.querySelector(\".point[data-launch='2']\").focus()")
    page.press("Enter")
    assert page.text("#card h2") == "cublas-gemm.1"


def _shown(browser: Browser, folder: Path, launches: tuple[Launch, ...]) -> Page:
    """The page of one strategy with these launches."""
    xla = full_comparison()["xla"]
    assert xla.analysis is not None
    alone = replace(xla, analysis=replace(xla.analysis, launches=launches))
    file = folder / "report.html"
    file.write_text(render_html(compare_analyses("f", [alone], "xla")), encoding="utf-8")
    return Page(browser, file)


def test_a_launch_that_beats_the_bandwidth_is_marked_and_explained(browser: Browser, tmp_path: Path):
    analysis = full_comparison()["xla"].analysis
    assert analysis is not None
    first, second, *_ = (launch for launch in analysis.launches if launch.flops)

    def least(launch: Launch) -> float:
        return 1e6 * (launch.bytes_read + launch.bytes_written) / analysis.device.memory_bandwidth

    def timed(times: dict[int, float]) -> Page:
        launches = (replace(each, measured_us=times.get(each.index)) for each in analysis.launches)
        return _shown(browser, tmp_path, tuple(launches))

    page = timed({first.index: 0.7 * least(first), second.index: 1.2 * least(second)})
    assert page.count("#roofline-view .above") == 1
    places = f"[...document.querySelectorAll('.above, .point[data-launch=\"{first.index}\"]')]"
    assert len(set(page.run(f"{places}.map((it) => it.getAttribute('cx'))"))) == 1
    assert "The point with a double edge is above the slope" in page.text("#roofline-note")
    assert "L2 cache" in page.text("#roofline-note")
    page = timed({})  # an estimate is never above
    assert page.count("#roofline-view .above") == 0
    assert "double edge" not in page.text("#roofline-note")


def test_roofs_that_are_close_have_labels_apart(browser: Browser, tmp_path: Path):
    analysis = full_comparison()["xla"].analysis
    assert analysis is not None
    launches = tuple(
        replace(each, inputs=tuple(replace(value, shape="f32[8]") for value in each.inputs)) if each.index % 2 else each
        for each in analysis.launches
    )
    page = _shown(browser, tmp_path, launches)
    roofs = "[...document.querySelectorAll('.roof-name')].slice(1)"
    labels = page.run(f"{roofs}.map((it) => [it.textContent, Number(it.getAttribute('y'))])")
    assert [name.split(":")[0] for name, _ in labels] == ["bf16", "f32 as TF32", "vector units"]
    heights = sorted(y for _, y in labels)
    assert all(below - above >= 11 for above, below in pairwise(heights)), "text of 11 px"


def test_a_numbered_scope_is_named_with_the_one_around_it(browser: Browser, tmp_path: Path):
    comparison = full_comparison()
    xla = comparison["xla"]
    assert xla.analysis is not None
    scopes = ("layers/0", "7", "block/mlp")
    missed = (replace(each, scope=scope) for each, scope in zip(xla.analysis.missed, scopes, strict=False))
    alone = replace(xla, analysis=replace(xla.analysis, missed=tuple(missed)))
    file = tmp_path / "report.html"
    file.write_text(render_html(compare_analyses("f", [alone], "xla")), encoding="utf-8")
    page = Page(browser, file)
    page.run("document.querySelectorAll('#advice-list details').forEach((it) => { it.open = true; })")
    page.wait("document.querySelectorAll('.values .what b').length === 3")
    names = page.run("[...document.querySelectorAll('.values .what b')].map((it) => it.textContent)")
    assert sorted(names) == ["layers/0", "mlp", "scope 7"]


_VISIBLE = """[...document.querySelectorAll('#graph-view .node')].filter((it) => {
  const [a, b] = [it.getBoundingClientRect(), document.getElementById('graph-view').getBoundingClientRect()];
  return a.right > b.left && a.left < b.right && a.bottom > b.top && a.top < b.bottom; }).length"""


def test_the_graph_zooms_moves_and_fits(page: Page):
    page.click("#unfold-all")
    assert page.run(_VISIBLE) > 0, "an empty canvas"
    page.click("#fit")
    assert page.run(_VISIBLE) == 13
    node = "#graph-view .node"
    _, _, fitted, _ = page.place(node)
    page.click("#zoom-in")
    page.click("#zoom-in")
    left, top, width, height = page.place(node)
    assert width > 1.5 * fitted
    frame = page.place("#graph-view")
    start = (frame[0] + 30, frame[1] + frame[3] / 2)
    page.drag(start, (start[0] + 200, start[1] + 50))
    moved = page.place(node)
    assert moved == pytest.approx([left + 200, top + 50, width, height], abs=1)
    assert page.run("document.getElementById('card').open") is False
    page.run("document.getElementById('graph-view').focus({ preventScroll: true })")  # else it moves under the mouse
    page.press("+")
    assert page.place(node)[2] > 1.2 * width
    page.click("#fit")
    page.wait(f"Math.abs(document.querySelector('{node}').getBoundingClientRect().width - {fitted}) < 0.5")


def test_a_drag_that_ends_on_a_launch_opens_nothing(page: Page):
    page.click("#unfold-all")
    left, top, width, height = page.place("#graph-view .node")
    middle = (left + width / 2, top + height / 2)
    page.drag(middle, (middle[0] + 60, middle[1] + 40))
    assert page.run("document.getElementById('card').open") is False
    page.click("#graph-view .node")
    assert page.run("document.getElementById('card').open") is True


def test_addresses_lead_to_launch_missed_fusion_and_decision(browser: Browser, full_file: Path):
    page = Page(browser, full_file, fragment="#launch-1@pallas")
    assert page.text("#card .over").startswith("pallas · launch #1")
    assert page.run("document.getElementById('focus').value") == "pallas"
    page.run("location.hash = '#missed-8'")
    page.wait("document.querySelector('.values .target')")
    assert page.run("document.getElementById('card').open") is False
    assert page.run("document.getElementById('focus').value") == "xla"
    assert page.run("document.querySelector('.target').dataset.ranks") == "8"
    _, top, _, height = page.place(".target")
    assert 0 <= top <= 900 - height
    analysis = full_comparison()["xla"].analysis
    assert analysis is not None
    last = len(analysis.decisions) - 1
    page.run(f"location.hash = '#decision-{last}'")
    page.wait("document.querySelector('#decision-groups tr.target')")
    assert analysis.decisions[last].producer in page.text("tr.target")
    page.run("location.hash = '#launch-999'")
    page.run("location.hash = '#%'")
    page.wait("location.hash === '#%'")
    assert page.complaints() == []


@pytest.mark.parametrize(
    ("words", "kind", "shows"),
    [
        ("softmax_fusion", "launch", "document.querySelector('#card h2')?.textContent === 'softmax_fusion'"),
        ("gate_up 28672", "missed", "document.querySelector('.values .target')?.dataset.ranks === '3'"),
        ("gate_up", "scope", "document.querySelector('tr.target')?.dataset.scope === 'block/gate_up_projection'"),
        ("block.py:114", "source", "document.getElementById('launch-count').textContent === '13 of 13 launches'"),
        ("more than one consumer", "decision", "document.querySelector('#decision-groups tr.target')"),
        ("scatter adds 8192", "hotspot", "document.querySelector('#advice-list .target')"),
    ],
)
def test_search_finds_everything(page: Page, words: str, kind: str, shows: str):
    page.run("document.activeElement.blur()")
    page.press("/")
    page.write("#search", words.upper())
    link = f"#found a[href^='#{kind}-']"
    assert page.count(link) > 0
    page.click(link)
    page.wait(shows)
    assert page.run("document.getElementById('found').hidden") is True


def test_search_works_by_keys(page: Page):
    page.write("#search", "softmax_fusion nosuchword")
    page.wait("!document.getElementById('found').hidden")
    assert page.text("#found") == "Nothing found."
    page.write("#search", "rms_norm.1 mosaic")
    page.press("ArrowDown")
    assert page.run("document.activeElement.hash").endswith("@pallas")
    page.press("Enter")
    page.wait("document.querySelector('.target') || document.getElementById('card').open")
    assert page.run("document.getElementById('focus').value") == "pallas"


def test_the_baseline_stands_against_the_fastest_other(page: Page):
    assert page.run("[focus.id, document.getElementById('focus').value, document.getElementById('other').value]")[
        1:
    ] == [
        "xla",
        "xla_cudnn",
    ]
    heads = (
        "[...document.querySelectorAll('table.scopes thead th')]"
        ".filter((it) => it.offsetWidth).map((it) => it.innerText)"
    )
    assert page.run(heads) == ["Scope", "xla", "xla_cudnn", "xla_cudnn − xla"]
    page.choose("#other", "pallas")
    assert page.run(heads) == ["Scope", "xla", "pallas", "pallas − xla"]
    page.click("#all-scopes")
    assert page.run(heads) == ["Scope", "unfused", "xla", "xla_cudnn", "pallas", "pallas − xla"]


def test_a_page_whose_baseline_failed_shows_another_strategy(browser: Browser, tmp_path: Path):
    file = tmp_path / "report.html"
    file.write_text(render_html(replace(full_comparison(), baseline="xla_gemm_v2")), encoding="utf-8")
    page = Page(browser, file)
    assert page.complaints() == []
    assert page.text("#graph .focus-name") == "unfused"


def test_a_redacted_page_works(browser: Browser, tmp_path: Path):
    file = tmp_path / "report.html"
    file.write_text(render_html(redacted(full_comparison())), encoding="utf-8")
    page = Page(browser, file)
    page.run("document.querySelectorAll('#advice-list details').forEach((it) => { it.open = true; })")
    page.click("#advice-list [data-launch='5']")
    assert page.text("#card h2") == "triton.5"
    assert page.complaints() == []


def test_fused_sites_are_listed(page: Page):
    assert page.count("details.sites") == 1
    page.click("details.sites summary")
    said = page.text("details.sites")
    for word in ("Fused sites of pallas", "block.py:56", "refused", "the mask is neither causal"):
        assert word in said


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_advice_is_readable_in_light_and_dark(page: Page, scheme: str):
    from tests.report.test_page_in_browser import CONTRAST

    page.prefer(scheme)
    for selector in (".cards .why", ".remedy", ".effect.none", ".code pre", ".time .share", ".copy"):
        ratio = page.run(f"({CONTRAST})({selector!r})")
        assert ratio >= 4.5, f"{selector}: contrast {ratio:.2f} in {scheme}"
