"""Shows progress on stderr while strategies compile: live lines on a terminal, else one line for each event."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

_FINISHED = {"done": "[green]done[/]", "failed": "[red]failed[/]", "not applicable": "[dim]does not apply here[/]"}


@contextmanager
def progress_on(console: Console, names: Sequence[str]) -> Iterator[Callable[[str, str], None]]:
    """Yields the `progress` function for `xlafuse.compare`; the name '' stands for the numerics."""
    if not console.is_terminal:
        yield _plain(console, len(names))
        return
    columns = (SpinnerColumn(finished_text=" "), TextColumn("{task.description}"), TextColumn("{task.fields[state]}"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        tasks: dict[str, TaskID] = {}
        for name in names:
            tasks[name] = progress.add_task(name, total=1, start=False, state="[dim]waits[/]")

        def show(name: str, state: str) -> None:
            label = name or "numerics on the CPU"
            if label not in tasks:
                tasks[label] = progress.add_task(label, total=1, start=False, state="")
            if state in _FINISHED:
                progress.start_task(tasks[label])
                progress.update(tasks[label], completed=1, state=_FINISHED[state])
            else:
                progress.start_task(tasks[label])
                progress.update(tasks[label], state=state if name else "")

        yield show


def _plain(console: Console, count: int) -> Callable[[str, str], None]:
    """Prints a line for each that is finished, with how many of the `count` strategies are."""
    started: dict[str, float] = {}
    finished: list[str] = []

    def show(name: str, state: str) -> None:
        if state == "compiling":
            started[name] = time.monotonic()
        elif state in _FINISHED:
            took = f" after {time.monotonic() - started[name]:.1f} s" if name in started else ""
            finished.append(name)
            of = f" ({len(finished)} of {count})" if len(finished) <= count else ""
            console.print(f"{name}: {state}{took}{of}", markup=False, highlight=False)

    return show
