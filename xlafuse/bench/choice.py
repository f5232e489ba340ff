"""Choice benchmark: measures whether `implementation=None` takes the fastest implementation at random sizes.

`xlafuse.bench.random_calls` draws the calls; a seed gives the same calls on any machine. Each call runs forward only
and with the backward pass. The benchmark checks every implementation of the operation against XLA's results. Then all
that run take turns with the call that names no implementation. An NVIDIA GPU must be attached.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from pallas_kernels import ArgSpec, OpSpec, choice, get_op, testing
from pallas_kernels.specs import plain
from xlafuse.bench.candidates import callable_of, checked, copies, inputs_of, timed
from xlafuse.bench.environment import Sampler
from xlafuse.bench.random_calls import Limits, random_call
from xlafuse.bench.results import Measured, Problem, Results, ShapeResult
from xlafuse.bench.settings import ChoiceSettings
from xlafuse.bench.timing import Candidate, buffer_sets

TIMED = Limits(length=2**14, rows=2**15, columns=2**14, flops=(3e7, 6e11), bytes=(1e6, 1e9))
"""Limits of the drawn calls; their forward pass takes two microseconds to a millisecond on an H200."""

Programs = Mapping[str, jax.stages.Compiled | Exception]
"""The compiled programs of a call by name, or why there is none: XLA's first, the call without a name last.

That call shares the program of the implementation that it takes, if it runs nothing else.
"""
_AHEAD = 2
"""Calls that each thread compiles before they are timed; more would keep the supervisor waiting for a result."""
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_LOWERING = threading.Lock()
"""Tracing is Python, which threads do not make faster."""
_NONE = "None: "
_SMALLEST = 2e-3
"""Smallest reference for an array's error (see `candidates.check_close`), the same as in the block benchmark."""
_MOST_TEMPORARY_BYTES = 16e9
"""XLA is not timed if its temporary buffers need more, as attention's scores may."""


def drawn(op: OpSpec, seed: int, number: int) -> ArgSpec:
    """Draws a call of an operation; its name starts with seed and number, such as "0.7"."""
    label = f"{seed}.{number}"
    call = random_call(op, f"{op.name} {label}", TIMED)
    return replace(call, name=f"{label} {call.name}")


def compile_ahead(items: Sequence[str], settings: ChoiceSettings) -> Iterator[Mapping[str, Programs]]:
    """Yields the programs of each call by mode; none if `settings.jobs` is 1, or where the arrays cannot be made.

    While programs compile none is timed, since XLA tries algorithms for products on the GPU.
    """
    size = _AHEAD * settings.jobs if settings.jobs > 1 else 1
    with ThreadPoolExecutor(settings.jobs) as pool:
        for batch in (items[first : first + size] for first in range(0, len(items), size)):
            tasks = {
                (item, mode): pool.submit(compiled, *call, mode, settings.seed)
                for item in batch
                for call in [_call(item, settings)]
                for mode in _modes(call[0], settings)
                if settings.jobs > 1 and time.time() <= settings.until
            }
            wait(tasks.values())
            for item in batch:
                yield {
                    mode: task.result() for (name, mode), task in tasks.items() if name == item and not task.exception()
                }


def bench_choice(
    item: str, settings: ChoiceSettings, sampler: Sampler | None = None, programs: Mapping[str, Programs] | None = None
) -> Iterator[ShapeResult | str]:
    """Times each mode of one call, such as "attention 7"; yields a str for a mode that the time limit left out.

    programs: by mode, those that are compiled already.
    """
    op, call = _call(item, settings)
    for mode in _modes(op, settings):
        if time.time() > settings.until:
            yield f"{op.name} {mode} {call.name}: not begun, the time was up"
            continue
        yield bench_call(op, call, mode, settings, sampler, (programs or {}).get(mode))


def _call(item: str, settings: ChoiceSettings) -> tuple[OpSpec, ArgSpec]:
    name, _, number = item.partition(" ")
    return get_op(name), drawn(get_op(name), settings.seed, int(number))


def _modes(op: OpSpec, settings: ChoiceSettings) -> list[str]:
    return [mode for mode in settings.modes if mode != "grad" or op.differentiable]


def bench_call(
    op: OpSpec,
    call: ArgSpec,
    mode: str,
    settings: ChoiceSettings,
    sampler: Sampler | None = None,
    programs: Programs | None = None,
) -> ShapeResult:
    """Times one mode of one call after checking its results; failures go into the result's problems."""
    structs = plain(call.structs())
    moved = op.forward_traffic(structs).bytes + (op.backward_traffic(structs).bytes if mode == "grad" else 0)
    result = ShapeResult(op=op.name, phase=mode, spec=call.name, bytes=moved)
    made = dict(programs or {})

    def make(problems: list[Problem]) -> list[Candidate]:
        cases = copies(testing.make_case(op, call, settings.seed), buffer_sets(moved))
        made.update({} if made else compiled(op, call, mode, settings.seed))
        return _candidates(made, [inputs_of(case, mode) for case in cases], problems)

    result = timed(result, make, settings, sampler, baseline="None")
    return replace(result, candidates=_with_default(result.candidates, made)) if made else result


def compiled(op: OpSpec, call: ArgSpec, mode: str, seed: int) -> Programs:
    """Compiles a call with each implementation, and without a name; failures are kept in place of programs."""
    inputs = inputs_of(testing.make_case(op, call, seed), mode)  # compiles what draws them, too
    found = choice(op.function, **plain(call.structs()))
    taken = found.runnable[0]
    named = [(name, name) for name in sorted(found.reasons, key=lambda name: name != "xla")]
    programs: dict[str, jax.stages.Compiled | Exception] = {}
    texts: dict[str, str] = {}
    for name, implementation in (*named, (f"{_NONE}{taken}", None)):
        try:
            with _LOWERING:
                traced = jax.jit(callable_of(op, mode, implementation)).trace(*inputs)
                lowered = traced.lower()
                # Traced, XLA's calls differ in the wrapper that refuses second derivatives; lowered, equal kernels
                # differ in their debug information.
                texts[name] = lowered.as_text() if taken == "xla" else _ADDRESS.sub("", str(traced.jaxpr))
                same = next((other for other in programs if texts.get(other) == texts[name]), None)
            run = programs[same] if same is not None and implementation is None else lowered.compile()
            if name == "xla" != taken and isinstance(run, jax.stages.Compiled):
                _check_memory(run)
            programs[name] = run
        except Exception as error:  # a failing implementation must not end the run of the others
            programs[name] = error
    return programs


def _candidates(programs: Programs, inputs: Sequence[tuple[Any, ...]], problems: list[Problem]) -> list[Candidate]:
    """Returns the different programs that run and agree with XLA, or with the first one if XLA does not run.

    Failures go into `problems`.
    """
    *named, default = programs

    def make(name: str) -> tuple[Candidate, Sequence[jax.Array]]:
        if isinstance(run := programs[name], Exception):
            raise run
        kind = "default" if name == default else "implementation"
        return Candidate(name=name, kind=kind, call=run, inputs=inputs), jax.block_until_ready(run(*inputs[0]))

    # Timed twice, the same program differs by up to 10 % at a few microseconds.
    is_own = all(programs[name] is not programs[default] for name in named)
    makers = {name: partial(make, name) for name in (*named, *([default] if is_own else []))}
    return checked(makers, problems, smallest=_SMALLEST)


def _with_default(measured: tuple[Measured, ...], programs: Programs) -> tuple[Measured, ...]:
    """Adds the call without a name, with the times of the implementation whose program it shares."""
    default, times = list(programs)[-1], {each.name: each for each in measured}
    same = next((times[name] for name in times if programs[name] is programs[default]), None)
    return measured if default in times or same is None else (*measured, replace(same, name=default, kind="default"))


def _check_memory(compiled: jax.stages.Compiled) -> None:
    memory = compiled.memory_analysis()
    taken = memory.temp_size_in_bytes if memory is not None else 0
    if taken > _MOST_TEMPORARY_BYTES:
        raise NotImplementedError(
            f"not timed: temporary buffers of {taken / 1e9:.0f} GB, more than {_MOST_TEMPORARY_BYTES / 1e9:.0f}"
        )


def default(result: ShapeResult) -> Measured | None:
    """Returns the call that named no implementation, or None if it was not timed."""
    return next(iter(result.of_kind("default")), None)


def best(result: ShapeResult) -> Measured | None:
    """Returns the fastest named implementation, or None if none was timed."""
    return min(result.of_kind("implementation"), key=lambda c: c.timing.median_us, default=None)


def ratio(result: ShapeResult) -> float:
    """Returns the best implementation's time over that of the call that names none; NaN if either was not timed."""
    ours, theirs = default(result), best(result)
    return theirs.timing.median_us / ours.timing.median_us if ours and theirs else math.nan


def is_behind(result: ShapeResult) -> bool:
    """Tells whether the call that names none takes both 3 % and 0.5 µs longer than the best implementation."""
    ours, theirs = default(result), best(result)
    if ours is None or theirs is None:
        return False
    return ours.timing.median_us > max(1.03 * theirs.timing.median_us, theirs.timing.median_us + 0.5)


def is_measured(result: ShapeResult) -> bool:
    """Tells whether the ratio is known and every implementation either ran or refused the arguments."""
    return math.isfinite(ratio(result)) and not any(problem.kind == "failed" for problem in result.problems)


def is_kept(results: Results) -> bool:
    """Tells whether every call was measured, and none is behind."""
    is_whole = not any(run.left_out for run in results.runs)
    return is_whole and all(is_measured(result) and not is_behind(result) for result in results.shapes)
