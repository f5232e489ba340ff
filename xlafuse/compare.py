"""One program under several fusion strategies, side by side."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from hlo_analysis.records import Comparison, StrategyResult
from xlafuse.errors import ComparisonError, InapplicablePlanError
from xlafuse.models.config import BlockConfig
from xlafuse.models.functional import block_function, resolve_config
from xlafuse.strategies import Strategy, get_strategy, resolve_strategies

State = Literal["compiling", "analysing", "done", "failed", "not applicable", "numerics"]
Progress = Callable[[str, State], None]
"""Told the strategy's name and what happens to it; for "numerics" the name is empty."""


def compare(
    block_or_fn: str | BlockConfig | Callable[..., Any],
    shapes: Sequence[Any],
    *,
    strategies: Iterable[str | Strategy] | None = None,
    target: str = "h200",
    mode: Literal["forward", "grad"] = "forward",
    baseline: str = "xla",
    numerics: bool = True,
    progress: Progress | None = None,
    **capture_options: Any,
) -> Comparison:
    """Compiles one program under each strategy, analyses what came out, and aligns it by the model's scopes.

    Args:
      block_or_fn: the name of a block preset, a `BlockConfig`, or any JAX function.
      shapes: for a block (batch, length); for a function its arguments, as arrays or `jax.ShapeDtypeStruct` trees.
      strategies: names or `Strategy` records; None takes all. The baseline is put first if it is not among them.
      target: what to compile for, by name or path; see `hlo_analysis.targets`.
      mode: "forward", or "grad" for the gradients with respect to all floating-point arguments.
      baseline: the strategy that differences are told against.
      numerics: for a block, also run each plan on the CPU at a small size against float64.
      progress: called with a strategy's name and state as work goes on.
      **capture_options: passed to `hlo_analysis.capture` (`autotune`, `timeout`, `keep`, ...).

    Returns a Comparison with a result for every strategy: one that failed, or that cannot be used here, holds the
    reason in `error` and has no analysis. Raises `UnknownNameError` for an unknown name, and `ComparisonError` when no
    strategy gave an analysis.
    """
    from hlo_analysis import diff
    from hlo_analysis.targets import load_target

    config = None if callable(block_or_fn) else resolve_config(block_or_fn)
    chosen = resolve_strategies(strategies)
    if baseline not in {strategy.name for strategy in chosen}:
        chosen = (get_strategy(baseline), *chosen)
    described = load_target(target)
    report = progress or (lambda name, state: None)

    results: list[StrategyResult] = []
    plans = {}
    for strategy in chosen:
        reason = strategy.unmet(
            is_block=config is not None, kind=described.kind, compute_capability=described.compute_capability
        )
        note = ""
        if reason is None and config is not None:
            try:
                strategy, note = fit_plan(strategy, config)
            except InapplicablePlanError as error:
                reason = str(error)
        result = StrategyResult(
            name=strategy.name, description=strategy.description + note, analysis=None, error=reason
        )
        if reason is None:
            result = _analysed(result, strategy, block_or_fn, config, shapes, target, mode, report, capture_options)
        if result.analysis is not None:
            plans[strategy.name] = strategy.plan
        report(strategy.name, "done" if result.analysis else "not applicable" if reason else "failed")
        results.append(result)

    if not plans:
        raise ComparisonError({result.name: result.error or "" for result in results})
    if numerics and config is not None:
        report("", "numerics")
        results = _with_numerics(results, config, plans, mode)
    if baseline not in plans:
        baseline = next(iter(plans))
    return diff.compare_analyses(_title(block_or_fn, config, shapes, mode, target), results, baseline)


def fit_plan(strategy: Strategy, config: BlockConfig) -> tuple[Strategy, str]:
    """Hands the sites that a block cannot give to the plan's kernels back to XLA.

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
    return dataclasses.replace(strategy, plan=strategy.plan.applicable(config)), f" Left to XLA here: {reasons}."


def _analysed(
    result: StrategyResult,
    strategy: Strategy,
    block_or_fn: Any,
    config: BlockConfig | None,
    shapes: Sequence[Any],
    target: str,
    mode: str,
    report: Progress,
    capture_options: dict[str, Any],
) -> StrategyResult:
    from hlo_analysis import analyze, capture

    if config is not None:
        function, arguments = block_function(config, tuple(shapes), plan=strategy.plan)
    else:
        function, arguments = block_or_fn, tuple(shapes)
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
        return dataclasses.replace(result, analysis=analyze(captured, label=strategy.name))
    # One strategy's failure, of whatever kind, must not cost the others their result.
    except Exception as error:
        return dataclasses.replace(result, error=f"{type(error).__name__}: {error}")


def _with_numerics(
    results: list[StrategyResult], config: BlockConfig, plans: dict[str, Any], mode: Literal["forward", "grad"]
) -> list[StrategyResult]:
    from xlafuse.numerics import check_plans

    checked = check_plans(config, plans, mode=mode)
    joined = []
    for result in results:
        found = checked.get(result.name)
        if isinstance(found, str):
            joined.append(dataclasses.replace(result, description=f"{result.description} {found}"))
        else:
            joined.append(dataclasses.replace(result, numerics=found))
    return joined


def _title(block_or_fn: Any, config: BlockConfig | None, shapes: Sequence[Any], mode: str, target: str) -> str:
    if config is not None:
        return f"{config.name} block, {'x'.join(map(str, shapes))}, {mode}, {target}"
    return f"{getattr(block_or_fn, '__qualname__', type(block_or_fn).__name__)}, {mode}, {target}"
