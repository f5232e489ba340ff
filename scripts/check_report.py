"""Checks that a written report holds what it must: `check_report.py DIR` with report.html and report.json in it."""

import sys
from pathlib import Path

from hlo_analysis.records import Comparison
from hlo_analysis.schema import from_json
from xlafuse.strategies import resolve_strategies


def problems(folder: Path) -> list[str]:
    """What is missing or wrong in the report, in sentences; empty when all is well."""
    comparison = from_json(Comparison, (folder / "report.json").read_text())
    found = [
        f"strategy {strategy.name} is missing"
        for strategy in resolve_strategies(None)
        if strategy.name not in {s.name for s in comparison.strategies}
    ]
    for strategy in comparison.strategies:
        analysis = strategy.analysis
        if analysis is None:
            found.append(f"{strategy.name}: no analysis: {strategy.error}")
            continue
        if not analysis.launches or not analysis.traffic.bytes:
            found.append(f"{strategy.name}: no launches or no traffic")
        if analysis.traffic.bytes > analysis.traffic.unfused_bytes:
            found.append(f"{strategy.name}: more traffic than with nothing fused")
    if not found:
        xla, unfused, pallas = (comparison[name].analysis for name in ("xla", "unfused", "pallas"))
        assert xla and unfused and pallas
        if xla.provenance.gemm_choice != "replayed" or xla.provenance.autotune_hits != xla.provenance.autotune_lookups:
            found.append(f"xla: GEMM choices are {xla.provenance.gemm_choice}, not replayed in full")
        if not unfused.launch_count > xla.launch_count:
            found.append("turning fusion off did not add launches")
        if not {decision.verdict for decision in xla.decisions} >= {"fused", "ineligible"}:
            found.append("xla: no decision says fused, or none says why not")
        if not xla.missed:
            found.append("xla: no missed fusion found")
        if "mosaic" not in pallas.launches_by_kind:
            found.append("pallas: no Mosaic kernel among its launches")
    page = (folder / "report.html").read_text()
    for needle in ("<svg", "Decisions", "</html>"):
        if needle not in page:
            found.append(f"report.html: no {needle}")
    if "http://" in page.replace("http://www.w3.org", "") or "https://" in page:
        found.append("report.html: it names an address outside itself")
    return found


if __name__ == "__main__":
    found = problems(Path(sys.argv[1]))
    print("\n".join(found) or "the report holds what it must")
    sys.exit(bool(found))
