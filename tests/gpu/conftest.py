from __future__ import annotations

import os

# Of a test's minute two thirds went into trying XLA's ways to compute products that run once. The baseline's errors are
# those of any of them.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"


def pytest_runtest_logreport(report):
    """Says at once what failed: a run that its time limit ends prints no summary."""
    if report.failed:
        errors = [line[1:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
        print(f"\nFAILED {report.nodeid} - {' / '.join(errors)[:600]}", flush=True)
