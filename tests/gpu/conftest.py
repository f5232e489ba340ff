from __future__ import annotations

from pathlib import Path

SLOW = ("attention", "qkv", "norm_linear", "lora", "linear_cross", "gated_linear", "linear", "dropout", "rope")
"""Parts of the names of the tests that compile longest."""


def pytest_collection_modifyitems(items):
    """The slow ones first, or one is begun when all others are done."""
    places = [i for i, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    slow_first = sorted(places, key=lambda i: [word not in items[i].nodeid for word in SLOW])
    for place, item in zip(places, [items[i] for i in slow_first], strict=True):
        items[place] = item


def pytest_runtest_logreport(report):
    """Says at once what failed: a run that its time limit ends prints no summary."""
    if report.failed:
        errors = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
        print(f"\nFAILED {report.nodeid} - {' / '.join(errors)[:600]}", flush=True)
