"""The page's text: what it holds, and that no name of the program can become markup."""

from __future__ import annotations

import base64
import gzip
import json
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hlo_analysis.diff import compare_analyses
from hlo_analysis.measured import with_measured
from hlo_analysis.records import Comparison
from hlo_analysis.report import render_html, render_notebook
from hlo_analysis.report.payload import embedded_json, payload
from hlo_analysis.targets import CPU_DEVICE
from tests.report.examples import HOSTILE, with_ptx, with_times


class _Tags(HTMLParser):
    """Collects tags, and the text of the scripts that have an id."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[str] = []
        self.texts: dict[str, str] = {}
        self._inside: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.extend(name for name, _ in attrs)
        self._inside = dict(attrs).get("id") if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self._inside = None

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.texts[self._inside] = self.texts.get(self._inside, "") + data


def _parsed(text: str) -> _Tags:
    parser = _Tags()
    parser.feed(text)
    return parser


@pytest.mark.parametrize("render", [render_html, render_notebook])
def test_hostile_names_stay_text(render, hostile: Comparison, comparison: Comparison):
    attacked, plain = _parsed(render(hostile)), _parsed(render(comparison))
    assert set(attacked.tags) <= set(plain.tags)
    assert "img" not in attacked.tags
    assert not any(name.startswith("on") for name in attacked.attributes)
    assert attacked.tags.count("script") == plain.tags.count("script")


def _unpacked(data: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(data, validate=True)))


def test_the_embedded_data_is_the_comparison(comparison: Comparison):
    data = _unpacked(_parsed(render_html(comparison)).texts["data"])
    assert data == json.loads(json.dumps(payload(comparison)))
    xla = next(strategy for strategy in data["strategies"] if strategy["name"] == "xla")
    assert xla["totals"]["launches"] == 13
    launches = [dict(zip(xla["launches"]["columns"], row, strict=True)) for row in xla["launches"]["rows"]]
    assert [launch["name"] for launch in launches] == [item.name for item in comparison["xla"].analysis.launches]  # type: ignore[union-attr]
    assert data["texts"][launches[5]["scope"]] == "block/attention"


def _ptx_of_launches(page: str) -> tuple[list[str], dict[str, list[int | None]]]:
    """The sources in the page, and the number of each launch's by strategy."""
    texts = _parsed(page).texts
    tables = {each["name"]: each["launches"] for each in _unpacked(texts["data"])["strategies"] if "launches" in each}
    places = {name: [row[table["columns"].index("ptx")] for row in table["rows"]] for name, table in tables.items()}
    return _unpacked(texts["ptx"]), places


def test_ptx_is_in_the_page_once(comparison: Comparison):
    sources, places = _ptx_of_launches(render_html(with_ptx(comparison)))
    assert len(sources) == len(set(sources)) > 5
    for strategy in comparison.strategies:
        if strategy.analysis is not None:
            shown = [None if place is None else sources[place] for place in places[strategy.name]]
            kernels = [launch.kernel for launch in strategy.analysis.launches]
            assert shown == [f".visible .entry {name}()  // </script>" if name else None for name in kernels]
    assert _ptx_of_launches(render_html(comparison))[0] == []


def test_ptx_of_other_strategies_gives_way_to_the_baselines(comparison: Comparison, monkeypatch: pytest.MonkeyPatch):
    every = with_ptx(comparison)
    base = every[every.baseline].analysis
    assert base is not None
    monkeypatch.setattr("hlo_analysis.report.payload.PTX_LIMIT", len(embedded_json(base.ptx)))
    sources, places = _ptx_of_launches(render_html(every))
    assert sources == list(base.ptx)
    assert -1 in places["unfused"]
    assert -1 not in places[every.baseline]
    monkeypatch.setattr("hlo_analysis.report.payload.PTX_LIMIT", 0)
    sources, places = _ptx_of_launches(render_html(every))
    assert sources == []
    assert {place for numbers in places.values() for place in numbers} == {None, -1}


def test_measured_times_stand_on_the_page(comparison: Comparison):
    page = render_html(with_times(comparison))
    assert "Wall clock, ms" in page
    assert "Measured on an NVIDIA H200 (bench, 2026-11-22)" in page
    assert "Wall clock" not in render_html(comparison)
    assert "measured" in render_notebook(with_times(comparison))
    assert "measured" not in render_notebook(comparison)


def test_a_time_of_another_program_is_grey_and_compared_with_nothing(comparison: Comparison):
    timed = with_times(comparison)
    xla = timed["xla"]
    assert xla.analysis is not None
    assert xla.analysis.measured is not None
    old = replace(xla.analysis.measured, differs="older program", kernel_us=1e6, launches=(), notes=())
    stale = replace(xla, analysis=with_measured(xla.analysis, old))
    alone = replace(comparison, strategies=(stale,), unfused=None, rows=())
    page = render_html(alone)
    shown = page[page.index("<table") : page.index("</table>")]
    assert '<span class="how stale">older program</span>' in shown
    assert "how measured" not in shown
    assert "Older program: measured on an NVIDIA H200 (bench, 2026-11-22), and no time of this program." in page
    assert stale.analysis is not None
    assert not any(launch.measured_us for launch in stale.analysis.launches)
    # Beside three strategies that were measured, the estimates decide.
    others = [each for each in timed.strategies if each.name != "xla"]
    mixed = render_html(replace(timed, strategies=(stale, *others), rows=()))
    assert mixed.count(">fastest<") == 1
    assert "Fastest of 4 strategies (estimated, since not every strategy was measured): xla_cudnn" in mixed


@pytest.mark.parametrize("baseline", ["xla", "xla_cudnn"])
def test_one_strategy_is_called_the_fastest(comparison: Comparison, baseline: str):
    page = render_html(replace(comparison, baseline=baseline))
    row = page[page.rindex("<tr data-strategy", 0, page.index(">fastest<")) : page.index(">fastest<")]
    assert 'data-strategy="xla_cudnn"' in row
    assert page.count(">fastest<") == 1


def test_the_versions_stand_beside_the_launches(comparison: Comparison):
    xla = comparison["xla"]
    assert xla.analysis is not None

    def top(*versions: tuple[str, str]) -> str:
        assert xla.analysis is not None
        analysis = replace(xla.analysis, provenance=replace(xla.analysis.provenance, versions=versions))
        page = render_html(replace(comparison, strategies=(replace(xla, analysis=analysis),), unfused=None, rows=()))
        return page[page.index('class="over"') : page.index("<h1>")]

    same = (("jax", "0.11.2"), ("jaxlib", "0.11.2"), ("jax-cuda13-plugin", "0.11.2"), ("numpy", "2.1"))
    assert "B2 S4096 · compiled by jax 0.11.2</p>" in top(*same)
    assert "compiled by jax 0.12.0, jax-cuda13-plugin 0.12.1<" in top(
        ("jax", "0.12.0"), ("jax-cuda13-plugin", "0.12.1")
    )
    assert "compiled by" not in top()


def test_a_page_for_a_cpu_has_no_words_of_a_gpu(comparison: Comparison):
    xla = comparison["xla"]
    assert xla.analysis is not None
    origin = replace(xla.analysis.provenance, target="cpu")
    launches = tuple(replace(each, kind="loop") for each in xla.analysis.launches)
    analysis = replace(xla.analysis, device=CPU_DEVICE, provenance=origin, missed=(), launches=launches, decisions=())
    alone = replace(comparison, strategies=(replace(xla, description="", analysis=analysis),), unfused=None, rows=())
    page = render_html(alone)
    said = page[page.index("<main>") : page.index("</main>")]
    for word in ("HBM", "L2 cache", "Pallas", "Occupancy", "GPU"):
        assert word not in said
    assert "Memory traffic" in said


@given(st.text())
def test_embedded_json_survives_any_text(text: str):
    """It is base64, which closes no element."""
    assert _unpacked(embedded_json({"text": text, text: 1})) == {"text": text, text: 1}


def test_launches_alike_take_little_room(comparison: Comparison):
    """The HLO of each layer is long, and most of all like that of the layer before."""
    analysis = comparison["xla"].analysis
    assert analysis is not None
    text = "".join(f"%multiply.{number} = f32[{number * number}] multiply(%a, %b)\n" for number in range(400))
    launches = tuple(
        replace(analysis.launches[0], index=number, name=f"fusion.{number}", hlo=f"{kind}.{number}\n{text}{kind}")
        for number, kind in enumerate(["loop", "reduction", "transpose", "sort"] * 20)
    )
    deep = replace(comparison["xla"], analysis=replace(analysis, launches=launches, decisions=(), missed=()))
    assert 40 * len(embedded_json(payload(replace(comparison, strategies=(deep,), rows=())))) < 80 * len(text)


def test_what_a_launch_moves_in_the_hosts_memory_is_on_its_card(comparison: Comparison):
    result = comparison.strategies[0]
    assert result.analysis is not None
    first, *others = result.analysis.launches
    offloading = replace(result.analysis, launches=(replace(first, host_bytes=67), *others))
    (strategy,) = payload(replace(comparison, strategies=(replace(result, analysis=offloading),), rows=()))[
        "strategies"
    ]
    table = strategy["launches"]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert [row["host"] for row in rows] == [67] + [0] * len(others)
    assert (rows[0]["written"], rows[0]["flops"]) == (first.bytes_written, first.flops)
    assert "launch.host" in render_html(comparison)


def test_embedded_json_refuses_what_is_not_json():
    with pytest.raises(ValueError, match="not JSON compliant"):
        embedded_json(float("nan"))


def test_the_page_names_no_address_outside_itself(comparison: Comparison):
    text = render_html(comparison).replace("http://www.w3.org/2000/svg", "")
    assert "http://" not in text
    assert "https://" not in text
    assert "default-src 'none'" in text


def test_what_a_reader_must_find(comparison: Comparison):
    text = render_html(comparison)
    for words in (
        "replayed 6 of 6",
        "<b>No analysis:</b> XLA said: INTERNAL: no such thing",
        "1.07× baseline error",
        "<svg",
        "Registers and spills are unknown: ptxas was not asked.",
        "TransformerBlock(llama3-8b), forward",
    ):
        assert words in text
    assert "in mlp_norm" in text


def test_the_table_of_scopes_counts_what_a_loop_launches(comparison: Comparison):
    """As the table of strategies does: a scan of 256 steps makes 256 launches of each of its kernels."""
    base = comparison["xla"]
    assert base.analysis is not None
    launches = tuple(replace(launch, scope="block", scopes=(), repeat=256) for launch in base.analysis.launches)
    alone = replace(base, analysis=replace(base.analysis, launches=launches))
    text = render_html(compare_analyses("t", (alone,), baseline="xla"))
    count = base.analysis.launches_by_kind["loop"]
    assert f"{256 * count} loop</span>" in text
    assert f" {count} loop</span>" not in text


def test_a_program_by_itself_is_compared_with_nothing(comparison: Comparison):
    alone = replace(comparison, unfused=None, strategies=(comparison[comparison.baseline],), rows=())
    for text, hidden in ((render_html(comparison), False), (render_html(alone), True)):
        assert ('<div class="choices" hidden>' in text) == hidden
        assert ("compiled in different ways" in text) != hidden


def test_failed_baseline_still_gives_a_page(comparison: Comparison):
    text = render_html(replace(comparison, baseline="xla_gemm_v2"))
    assert "xla_gemm_v2 could not be analysed: XLA said: INTERNAL: no such thing" in text


def test_the_page_is_the_same_every_time(comparison: Comparison):
    assert render_html(comparison) == render_html(comparison)


def test_hostile_text_is_hostile():
    assert "</script>" in HOSTILE
    assert "onerror" in HOSTILE


def test_a_program_without_scopes_is_told_how_to_have_them(comparison: Comparison):
    result = comparison.strategies[0]
    assert result.analysis is not None
    launches = tuple(replace(launch, scope="", scopes=()) for launch in result.analysis.launches)
    nameless = replace(result, analysis=replace(result.analysis, launches=launches))
    hint = "jax.named_scope("
    assert hint in render_html(compare_analyses("f", (nameless,), nameless.name))
    assert hint not in render_html(comparison)
