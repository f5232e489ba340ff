"""Fuses many generated programs and compares what they compute.

    python scripts/try_fuse.py --examples 10000

Programs come from tests/fusion/generated_programs.py: near-misses of every pattern that `xlafuse.fuse` knows.
Operations run by their XLA references. Prints how many programs ran, how many sites were taken, and each program that
gave other numbers.
"""

from __future__ import annotations

import argparse
import collections
import sys
import time
from pathlib import Path

from hypothesis import Phase, given, seed, settings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fusion"))


def main() -> int:
    """Runs them; 1 where one failed."""
    from generated_programs import Program, programs  # pyright: ignore[reportMissingImports]
    from rewriting import checked  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1000, help="programs to generate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0, help="stop generating after so long")
    options = parser.parse_args()
    ran: set[str] = set()
    families: collections.Counter[str] = collections.Counter()
    sites: collections.Counter[str] = collections.Counter()
    failures: dict[str, str] = {}
    until = time.monotonic() + 60 * options.minutes

    @seed(options.seed)
    @settings(
        max_examples=options.examples,
        deadline=None,
        database=None,
        phases=[Phase.generate],
    )
    @given(programs())
    def run(program: Program) -> None:
        if program.name in ran or time.monotonic() > until:
            return
        ran.add(program.name)
        families[program.name.partition(",")[0]] += 1
        try:
            sites.update(checked(program.fn, *program.arguments))
        except Exception as error:
            failures[program.name] = f"{type(error).__name__}: {error}"
            print(f"FAILED {program}\n    {failures[program.name]}", flush=True)
        if len(ran) % 500 == 0:
            print(f"{len(ran)} programs, {sites.total()} sites, {len(failures)} failures", flush=True)

    run()
    print(f"{len(ran)} programs ran ({', '.join(f'{name} {count}' for name, count in families.most_common())})")
    print(f"{sites.total()} sites taken ({', '.join(f'{name} {count}' for name, count in sites.most_common())})")
    print(f"{len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
