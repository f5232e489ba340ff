"""The pages of docs/studies and the tables of docs/studies.md, from notebooks/results/studies.

scripts/write_studies.py                      # writes them and draws the plots
scripts/write_studies.py --merge A B C        # adds result files to notebooks/results/studies
"""

from __future__ import annotations

import argparse
from pathlib import Path

from xlafuse.bench.tables import place
from xlafuse.files import to_json
from xlafuse.studies import STUDIES, get_study
from xlafuse.studies.pages import overview, page, plot
from xlafuse.studies.records import StudyResult, load, merged
from xlafuse.studies.tree import decision_tree

ROOT = Path(__file__).resolve().parents[1]
KEPT, DOCS = ROOT / "notebooks/results/studies", ROOT / "docs"
OVERVIEW, PAGES = DOCS / "studies.md", DOCS / "studies"


def main() -> None:
    """Adds the files that --merge names, and writes the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--merge", nargs="+", type=Path, metavar="FILE")
    options = parser.parse_args()
    for path in options.merge or ():
        add(load(path))
    PAGES.mkdir(parents=True, exist_ok=True)
    for name, result in kept().items():
        plot(get_study(name), result, PAGES / f"{name}.svg")
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


def add(result: StudyResult) -> None:
    """Merges a result into what is kept."""
    path = KEPT / f"{result.study}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    both = [load(path), result] if path.is_file() else [result]
    path.write_text(to_json(merged(both)), encoding="utf-8")


def kept() -> dict[str, StudyResult]:
    """The committed results, by study."""
    return {name: load(path) for name in STUDIES if (path := KEPT / f"{name}.json").is_file()}


def pages() -> dict[Path, str]:
    """What each page has to say."""
    results = kept()
    studies = [(get_study(name), get_study(name).conclude(result)) for name, result in results.items()]
    text = place(OVERVIEW.read_text(encoding="utf-8"), overview(studies), "studies")
    text = place(text, decision_tree(results), "tree")
    made = {
        PAGES / f"{name}.md": page(get_study(name), result, has_plot=(PAGES / f"{name}.svg").is_file())
        for name, result in results.items()
    }
    return {OVERVIEW: text, **made}


if __name__ == "__main__":
    main()
