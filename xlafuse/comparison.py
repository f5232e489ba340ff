"""Compares one program under several fusion strategies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hlo_analysis.records import Analysis, Comparison, Numerics, SiteRecord, StrategyResult
from xlafuse.compilation import compilation_pool, one_at_a_time
from xlafuse.errors import ComparisonError, InapplicablePlanError
from xlafuse.measurements import with_recordings
from xlafuse.models.config import PRESETS, BlockConfig
from xlafuse.models.functional import block_function, resolve_config
from xlafuse.models.plan import FusionPlan
from xlafuse.models.shardings import Layout
from xlafuse.regressions import difference, is_worse
from xlafuse.strategies import STRATEGIES, Strategy, get_strategy, resolve_strategies

if TYPE_CHECKING:
    from hlo_analysis.catalogue import Catalogue

Mode = Literal["forward", "grad"]
State = Literal["compiling", "analysing", "done", "failed", "not applicable", "numerics"]
Progress = Callable[[str, State], None]
"""Called with a strategy's name and its new state, from several threads but one call at a time.

The name is empty for "numerics". For a trial the name is "try" and the change.
"""


def compare(
    block_or_fn: str | BlockConfig | Callable[..., Any],
    shapes: Any,
    *,
    strategies: Iterable[str | Strategy] | None = None,
    target: str = "h200",
    mode: Mode = "forward",
    baseline: str = "xla",
    layout: Layout | None = None,
    numerics: bool = True,
    tries: int = 0,
    progress: Progress | None = None,
    ready: Callable[[Comparison], None] | None = None,
    keep_captures: Any = None,
    **capture_options: Any,
) -> Comparison:
    """Compiles one program under each strategy, analyzes each, and aligns them by the model's scopes.

    Args:
      block_or_fn: the name of a block preset, a `BlockConfig`, or any JAX function.
      shapes: (batch, length) for a block; the tuple of arguments for a function, as arrays, `jax.ShapeDtypeStruct`s or
        trees of them.
      strategies: names or `Strategy` records; None takes all. The baseline is put first if it is not among them.
      target: name or path of the GPU to compile for; see `hlo_analysis.targets`.
      mode: "forward", or "grad" for the gradients with respect to all floating-point arguments.
      baseline: the strategy that the others are compared with.
      layout: shards a block over a mesh of GPUs, see `xlafuse.models.layout_of`; the numbers are those of one GPU. A
        function's arguments have shardings of their own.
      numerics: for a block, also runs each plan on the CPU at a small size and compares it with float64.
      tries: how many remedies of the baseline's missed fusions to try; see `xlafuse.try_remedies`.
      progress: called with a strategy's name and state as work goes on; see `Progress`.
      ready: called with the comparison before remedies are tried, which takes as long again; not if none are.
      keep_captures: folder where each strategy's capture is saved as STRATEGY.zip, which `Capture.load` and `xlafuse
        report --capture` open. It is created if missing.
      **capture_options: passed to `hlo_analysis.capture` (`autotune`, `timeout`, `measure`, ...).

    Returns a Comparison with a result for every strategy. A strategy that failed, or that cannot be used here, holds
    the reason in `error` and has no analysis. Times recorded for a preset on such a GPU are in `Analysis.measured`.
    Raises `UnknownNameError` for an unknown name, `ShardingError` for a layout that does not fit, and `ComparisonError`
    if no strategy gave an analysis.
    """
    from hlo_analysis import diff
    from hlo_analysis.targets import load_target

    config = None if callable(block_or_fn) else resolve_config(block_or_fn)
    # Turning a lone array into a tuple would split it along its first axis.
    shapes = tuple(shapes) if isinstance(shapes, (tuple, list)) else (shapes,)
    if config is not None:
        block_function(config, shapes, layout=layout)  # a bad shape is the caller's error, not each strategy's
    chosen = resolve_strategies(strategies)
    if baseline not in {strategy.name for strategy in chosen}:
        chosen = (get_strategy(baseline), *chosen)
    described = load_target(target)
    report = one_at_a_time(progress)
    keep = None if keep_captures is None else Path(keep_captures)
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    program = _Program(
        block_or_fn=block_or_fn,
        config=config,
        shapes=shapes,
        layout=layout,
        target=target,
        mode=mode,
        keep=keep,
        capture_options=capture_options,
    )
    here = {"kind": described.kind, "compute_capability": described.compute_capability}
    named = {strategy.name: strategy for strategy in chosen}
    unmet = {name: each.unmet(is_block=config is not None, **here) for name, each in named.items()}

    with compilation_pool(described.kind) as pool:
        pending = {name: pool.submit(_analyse, each, unmet[name], program, report) for name, each in named.items()}
        # `fuse` has already compared each site with the operation's definition.
        plans = {name: each.plan for name, each in named.items() if unmet[name] is None and not each.fuses}
        checked = _check_numerics(config, plans, mode, report) if numerics and config is not None else {}
        results = {name: _with_numerics(each.result(), checked) for name, each in pending.items()}
    for name, strategy in named.items():
        plain, fused = _plain(strategy, chosen, results), results[name].analysis
        if strategy.fuses and plain is not None and fused is not None and is_worse(fused, plain):
            worse = f"fuse makes this program worse: {difference(plain, fused)}. `xlafuse fuse` says what to skip."
            results[name] = dataclasses.replace(results[name], description=f"{results[name].description} {worse}")

    def aligned() -> Comparison:
        reference = baseline if baseline in analyses else next(iter(analyses))
        title = _title(block_or_fn, config, shapes, mode, target, layout)
        comparison = diff.compare_analyses(title, tuple(results.values()), reference, unfused="unfused")
        is_known = all(STRATEGIES.get(each.name, each) == each for each in chosen)
        is_recorded = config is not None and PRESETS.get(config.name) == config and layout is None
        if config is None or not is_recorded or described.kind != "cuda" or not is_known:
            return comparison
        return with_recordings(comparison, config.name, "x".join(map(str, shapes)), mode, described.device_kind)

    analyses = {name: result.analysis for name, result in results.items() if result.analysis is not None}
    if not analyses:
        raise ComparisonError({name: result.error or "" for name, result in results.items()})
    if ready is not None and tries and baseline in analyses:
        ready(aligned())
    if baseline in analyses:
        with_trials = _with_trials(analyses[baseline], named[baseline], program, tries, report)
        results[baseline] = dataclasses.replace(results[baseline], analysis=with_trials)
    return aligned()


@dataclass(frozen=True, kw_only=True)
class _Program:
    """The program that every strategy compiles."""

    block_or_fn: Any
    config: BlockConfig | None
    shapes: tuple[Any, ...]
    layout: Layout | None
    target: str
    mode: Mode
    keep: Path | None
    """Folder for the captures."""
    capture_options: Mapping[str, Any]

    @property
    def extra_options(self) -> dict[str, Any]:
        """Returns the capture options of further compilations, which do not run on the GPU and are not kept."""
        return {name: value for name, value in self.capture_options.items() if name not in ("measure", "keep")}

    def under(self, strategy: Strategy) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Returns the function under the strategy's plan, and its arguments."""
        if self.config is None:
            return self.block_or_fn, self.shapes
        function, arguments = block_function(self.config, self.shapes, plan=strategy.plan, layout=self.layout)
        return strategy.rewritten(function) if strategy.overlaps else function, arguments

    def catalogue_for(self, strategy: Strategy) -> Catalogue:
        """Returns the kernels that remedies may name, with what `fuse` finds in the function."""
        return self._catalogue if self.config is None else self._catalogue_of(*self.under(strategy))

    @cached_property
    def _catalogue(self) -> Catalogue:
        return self._catalogue_of(self.block_or_fn, self.shapes)

    def _catalogue_of(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Catalogue:
        from hlo_analysis.targets import load_target
        from xlafuse.catalogue import catalogue_of
        from xlafuse.findings import find

        return catalogue_of(find(function, arguments, load_target(self.target)))


def _analyse(strategy: Strategy, unmet: str | None, program: _Program, report: Progress) -> StrategyResult:
    from hlo_analysis.analysis import analyze
    from hlo_analysis.capture import capture
    from hlo_analysis.capture.lowering import leave_out_frames, leave_out_packages
    from pallas_kernels.primitives.partitioned import kernel_warnings
    from xlafuse.fusion.program import FusedProgram, NothingFusedError

    leave_out_frames(__file__)
    leave_out_packages("xlafuse", "pallas_kernels")
    result = StrategyResult(
        name=strategy.name,
        description=strategy.description,
        analysis=None,
        error=unmet,
        call=_call(strategy, program),
    )
    if unmet is not None:
        report(strategy.name, "not applicable")
        return result
    function, arguments = program.under(strategy)
    fused = FusedProgram(function) if strategy.fuses else None
    partitioned: dict[str, str] = {}
    try:
        report(strategy.name, "compiling")
        with kernel_warnings() as partitioned:
            captured = capture(
                function if fused is None else fused.function,
                *arguments,
                target=program.target,
                mode=program.mode,
                compiler_options=dict(strategy.compiler_options),
                label=strategy.name,
                **program.capture_options,
            )
        if program.keep is not None:
            captured.save(program.keep / f"{strategy.name}.zip")
        report(strategy.name, "analysing")
        analysis = analyze(captured, label=strategy.name, catalogue=program.catalogue_for(strategy))
        notes = (*analysis.provenance.notes, *(f"{text}." for text in partitioned))
        provenance = dataclasses.replace(analysis.provenance, notes=notes)
        result = dataclasses.replace(result, analysis=dataclasses.replace(analysis, provenance=provenance))
        state, reason = "done", None
    # A failure of one strategy must not lose the results of the others.
    except Exception as error:
        # The error lists the block's arguments, which are the same for all strategies; its cause is enough.
        cause = error.__cause__ if program.config is not None and error.__cause__ is not None else error
        state, reason = "failed", f"{type(cause).__name__}: {cause}"
        if isinstance(error.__cause__, InapplicablePlanError):
            state = "not applicable"
        if isinstance(error.__cause__, NothingFusedError):
            state, reason = "not applicable", f"{error.__cause__} {strategy.name!r} would be 'xla' under another name."
    report(strategy.name, state)
    sites = () if fused is None else fused.sites
    return dataclasses.replace(result, error=reason, sites=tuple(_as_lowered(site, partitioned) for site in sites))


def _call(strategy: Strategy, program: _Program) -> str:
    """Returns the code that runs the program under a strategy: an expression of a function, lines of a block."""
    options = f", compiler_options={dict(strategy.compiler_options)}" if strategy.compiler_options else ""
    if (config := program.config) is not None:
        fused = f', plan=xlafuse.get_strategy("{strategy.name}").plan' if strategy.plan.fused_sites else ""
        name = f'"{config.name}"' if PRESETS.get(config.name) == config else "config"
        made = f"fn, arguments = xlafuse.block_function({name}, {program.shapes}{fused})"
        return f"{made}\nstep = jax.jit(fn{options})"
    name = getattr(program.block_or_fn, "__name__", "fn")
    name = f"xlafuse.fuse({name})" if strategy.fuses else name
    name = f"jax.grad({name})" if program.mode == "grad" else name
    return f"jax.jit({name}{options})"


def _as_lowered(site: SiteRecord, partitioned: Mapping[str, str]) -> SiteRecord:
    """Returns a site that was taken, and left to XLA when the program was lowered for several devices, as such."""
    text = next((text for text, operation in partitioned.items() if operation == site.operation), None)
    if text is None or site.outcome != "taken":
        return site
    return dataclasses.replace(site, outcome="left to XLA", implementation="", reason=text)


def _plain(
    strategy: Strategy, strategies: Iterable[Strategy], results: Mapping[str, StrategyResult]
) -> Analysis | None:
    """Returns the analysis of the strategy that differs from one only in that it does not fuse."""
    wanted = strategy.plan, strategy.compiler_options
    same = (each for each in strategies if (each.plan, each.compiler_options) == wanted)
    return next((results[each.name].analysis for each in same if not each.fuses), None)


def _with_trials(analysis: Analysis, strategy: Strategy, program: _Program, count: int, report: Progress) -> Analysis:
    """Returns the analysis of a strategy with trials of its remedies."""
    from xlafuse.fusion.program import FusedProgram
    from xlafuse.trials import try_remedies

    if not count:
        return analysis
    function, arguments = program.under(strategy)
    function = FusedProgram(function).function if strategy.fuses else function
    return try_remedies(
        analysis,
        function,
        *arguments,
        count=count,
        target=program.target,
        mode=program.mode,
        progress=lambda change, state: report(f"try {change}", state),
        **program.extra_options,
    )


def _check_numerics(
    config: BlockConfig, plans: Mapping[str, FusionPlan], mode: Mode, report: Progress
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


def _title(
    block_or_fn: Any,
    config: BlockConfig | None,
    shapes: tuple[Any, ...],
    mode: str,
    target: str,
    layout: Layout | None,
) -> str:
    if config is not None:
        spread = f" ({layout})" if layout else ""
        return f"{config.name} block, {'x'.join(map(str, shapes))}, {mode}, {target}{spread}"
    return f"{getattr(block_or_fn, '__qualname__', type(block_or_fn).__name__)}, {mode}, {target}"
