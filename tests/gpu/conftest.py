from __future__ import annotations


def pytest_runtest_logreport(report):
    """Says at once what failed: a run that its time limit ends prints no summary."""
    if report.failed:
        errors = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
        print(f"\nFAILED {report.nodeid} - {' / '.join(errors)[:600]}", flush=True)
