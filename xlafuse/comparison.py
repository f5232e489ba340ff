"""One program under several fusion strategies, side by side."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hlo_analysis.records import Comparison, Numerics, StrategyResult
from xlafuse.errors import ComparisonError, InapplicablePlanError
from xlafuse.measurements import with_recordings
from xlafuse.models.config import PRESETS, BlockConfig
from xlafuse.models.functional import block_function, resolve_config
from xlafuse.models.plan import FusionPlan
from xlafuse.strategies import STRATEGIES, Strategy, get_strategy, resolve_strategies

if TYPE_CHECKING:
    from hlo_analysis.targets import Target

Mode = Literal["forward", "grad"]
State = Literal["compiling", "analysing", "done", "failed", "not applicable", "numerics"]
Progress = Callable[[str, State], None]
"""Called with a strategy's name and its new state, from several threads but one call at a time. The name is empty for
"numerics"."""


def compare(
    block_or_fn: str | BlockConfig | Callable[..., Any],
    shapes: Any,
    *,
    strategies: Iterable[str | Strategy] | None = None,
    target: str = "h200",
    mode: Mode = "forward",
    baseline: str = "xla",
    numerics: bool = True,
    progress: Progress | None = None,
    **capture_options: Any,
) -> Comparison:
    """Compiles one program under each strategy, analyzes each, and aligns them by the model's scopes.

    Args:
      block_or_fn: the name of a block preset, a `BlockConfig`, or any JAX function.
      shapes: for a block (batch, length); for a function the tuple of its arguments, arrays or
        `jax.ShapeDtypeStruct`s or trees of them.
      strategies: names or `Strategy` records; None takes all. The baseline is put first if it is not among them.
      target: what to compile for, by name or path; see `hlo_analysis.targets`.
      mode: "forward", or "grad" for the gradients with respect to all floating-point arguments.
      baseline: the strategy that differences are taken against.
      numerics: for a block, also run each plan on the CPU at a small size against float64.
      progress: called with a strategy's name and state as work goes on; see `Progress`.
      **capture_options: passed to `hlo_analysis.capture` (`autotune`, `timeout`, `measure`, ...).

    Returns a Comparison with a result for every strategy: one that failed, or that cannot be used here, holds the
    reason in `error` and has no analysis. What was recorded of a preset on such a GPU is in `Analysis.measured`.
    Raises `UnknownNameError` for an unknown name, and `ComparisonError` when no strategy gave an analysis.
    """
    from hlo_analysis import diff
    from hlo_analysis.targets import load_target

    config = None if callable(block_or_fn) else resolve_config(block_or_fn)
    # A lone array must not be taken apart along its first axis.
    shapes = tuple(shapes) if isinstance(shapes, (tuple, list)) else (shapes,)
    if config is not None:
        block_function(config, shapes)  # a bad shape is the caller's error, and not each strategy's
    chosen = resolve_strategies(strategies)
    if baseline not in {strategy.name for strategy in chosen}:
        chosen = (get_strategy(baseline), *chosen)
    described = load_target(target)
    report = _Progress(progress)
    jobs = [_prepare(strategy, config, described) for strategy in chosen]

    def run(job: _Job) -> StrategyResult:
        return _analysed(job, block_or_fn, config, shapes, target, mode, report, capture_options)

    # Each compilation has a process of its own. On an attached GPU they would disturb each other's autotuning.
    workers = 1 if described.kind == "attached" else min(4, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(max_workers=workers)
    try:
        pending = [pool.submit(run, job) for job in jobs]
        plans = {job.strategy.name: job.strategy.plan for job in jobs if job.refusal is None}
        checked = _check_numerics(config, plans, mode, report) if numerics and config is not None else {}
        results = [_with_numerics(future.result(), checked) for future in pending]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)

    analysed = [result.name for result in results if result.analysis is not None]
    if not analysed:
        raise ComparisonError({result.name: result.error or "" for result in results})
    reference = baseline if baseline in analysed else analysed[0]
    title = _title(block_or_fn, config, shapes, mode, target)
    comparison = diff.compare_analyses(title, results, reference, unfused="unfused")
    is_known = all(STRATEGIES.get(each.name, each) == each for each in chosen)
    if config is None or PRESETS.get(config.name) != config or described.kind != "cuda" or not is_known:
        return comparison
    return with_recordings(comparison, config.name, "x".join(map(str, shapes)), mode, described.device_kind)


def fit_plan(strategy: Strategy, config: BlockConfig) -> tuple[Strategy, str]:
    """Gives the sites that the plan's kernels cannot serve in this block to XLA.

    Returns the strategy to run and a note for its description, '' when nothing changed. Raises `InapplicablePlanError`
    when no site of the plan is left, since the strategy would be plain XLA under another name.
    """
    unfit = strategy.plan.inapplicable(config)
    if not unfit:
        return strategy, ""
    reasons = "; ".join(f"{site}: {reason}" for site, reason in unfit.items())
    if len(unfit) == len(strategy.plan.fused_sites):
        raise InapplicablePlanError(
            f"{strategy.name!r} has no kernel for this block ({reasons}); it would be 'xla' under another name."
        )
    return dataclasses.replace(strategy, plan=strategy.plan.applicable(config)), f" No kernel here for {reasons}."


@dataclass(frozen=True, kw_only=True)
class _Job:
    strategy: Strategy
    description: str
    refusal: str | None


class _Progress:
    """Calls the progress function from one thread at a time."""

    def __init__(self, progress: Progress | None):
        self._progress = progress
        self._lock = threading.Lock()

    def __call__(self, name: str, state: State) -> None:
        if self._progress is not None:
            with self._lock:
                self._progress(name, state)


def _prepare(strategy: Strategy, config: BlockConfig | None, target: Target) -> _Job:
    refusal = strategy.unmet(
        is_block=config is not None, kind=target.kind, compute_capability=target.compute_capability
    )
    note = ""
    if refusal is None and config is not None:
        try:
            strategy, note = fit_plan(strategy, config)
        except InapplicablePlanError as error:
            refusal = str(error)
    return _Job(strategy=strategy, description=strategy.description + note, refusal=refusal)


def _analysed(
    job: _Job,
    block_or_fn: Any,
    config: BlockConfig | None,
    shapes: tuple[Any, ...],
    target: str,
    mode: Mode,
    report: _Progress,
    capture_options: dict[str, Any],
) -> StrategyResult:
    from hlo_analysis.analysis import analyze
    from hlo_analysis.capture import capture
    from hlo_analysis.capture.lowering import leave_out_frames, leave_out_packages
    from xlafuse.catalogue import KERNELS

    leave_out_frames(__file__)
    leave_out_packages("xlafuse", "pallas_kernels")
    strategy = job.strategy
    result = StrategyResult(name=strategy.name, description=job.description, analysis=None, error=job.refusal)
    if job.refusal is not None:
        report(strategy.name, "not applicable")
        return result
    if config is not None:
        function, arguments = block_function(config, shapes, plan=strategy.plan)
    else:
        function, arguments = block_or_fn, shapes
    try:
        report(strategy.name, "compiling")
        captured = capture(
            function,
            *arguments,
            target=target,
            mode=mode,
            compiler_options=dict(strategy.compiler_options),
            label=strategy.name,
            **capture_options,
        )
        report(strategy.name, "analysing")
        result = dataclasses.replace(result, analysis=analyze(captured, label=strategy.name, catalogue=KERNELS))
    # A failure of one strategy must not lose the results of the others.
    except Exception as error:
        report(strategy.name, "failed")
        # A block's arguments, which the error lists, are the same for all strategies: the cause is enough.
        cause = error.__cause__ if config is not None and error.__cause__ is not None else error
        return dataclasses.replace(result, error=f"{type(cause).__name__}: {cause}")
    report(strategy.name, "done")
    return result


def _check_numerics(
    config: BlockConfig, plans: Mapping[str, FusionPlan], mode: Mode, report: _Progress
) -> dict[str, Numerics | str]:
    from xlafuse.numerics import check_plans

    report("", "numerics")
    try:
        return check_plans(config, plans, mode=mode)
    except Exception as error:  # such as JAX_PLATFORMS without a CPU; the analyses stay useful
        return dict.fromkeys(plans, f"Numerics not checked: {type(error).__name__}: {error}")


def _with_numerics(result: StrategyResult, checked: Mapping[str, Numerics | str]) -> StrategyResult:
    found = checked.get(result.name)
    if isinstance(found, str):
        return dataclasses.replace(result, description=f"{result.description} {found}")
    return dataclasses.replace(result, numerics=found)


def _title(block_or_fn: Any, config: BlockConfig | None, shapes: tuple[Any, ...], mode: str, target: str) -> str:
    if config is not None:
        return f"{config.name} block, {'x'.join(map(str, shapes))}, {mode}, {target}"
    return f"{getattr(block_or_fn, '__qualname__', type(block_or_fn).__name__)}, {mode}, {target}"
