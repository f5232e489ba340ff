"""A comparison built by hand, with the sizes of a Llama-size block at B2 S4096 in bf16, for tests of the views."""

from __future__ import annotations

from dataclasses import replace

from hlo_analysis.diff import compare_analyses
from hlo_analysis.hotspots import timed
from hlo_analysis.measured import with_measured
from hlo_analysis.records import (
    Analysis,
    Comparison,
    Decision,
    Device,
    Hotspot,
    Intermediate,
    Launch,
    LaunchTime,
    Measured,
    Memory,
    MissedFusion,
    Numerics,
    Provenance,
    SiteRecord,
    StrategyResult,
    Traffic,
    Trial,
    Value,
)
from tests.report.example_steps import (
    ARGUMENTS,
    CUDNN_STEPS,
    PALLAS_STEPS,
    SCORES_BYTES,
    UNFUSED_STEPS,
    X_BYTES,
    XLA_STEPS,
    Step,
)

HOSTILE = "</script><img src=x onerror=\"document.title='owned'\">{{7*7}}\u2028&amp;"

H200 = Device(
    name="h200",
    description="NVIDIA H200 SXM, 132 SMs, 141 GB HBM3e",
    memory_bandwidth=4.8e12,
    matrix_flops=(("bf16", 989e12), ("f32", 494e12)),
    vector_flops=66.9e12,
    launch_overhead_us=2.0,
    source="NVIDIA H200 datasheet",
)


def launches_of(steps: tuple[Step, ...]) -> tuple[Launch, ...]:
    """The steps as launches: bytes from the sizes, roofline from the H200's peaks."""
    made: dict[str, int] = {}
    sizes = dict(ARGUMENTS)
    launches = []
    for index, step in enumerate(steps):
        inputs = tuple(
            Value(name=name, shape=sizes[name][0], bytes=sizes[name][1], producer=made.get(name)) for name in step.reads
        )
        read = sum(value.bytes for value in inputs)
        moved = read + step.size
        memory_us, compute_us = moved / 4.8e12 * 1e6, step.flops / 989e12 * 1e6
        launches.append(
            Launch(
                index=index,
                thunk_id=index + 1,
                name=step.name,
                kernel=None if step.kind in ("cublas", "cublaslt", "cudnn") else step.name.replace(".", "_"),
                kind=step.kind,
                computation="main",
                grid=(8192, 1, 1) if step.kind not in ("cublas", "cublaslt", "cudnn") else None,
                block=(128, 1, 1) if step.kind not in ("cublas", "cublaslt", "cudnn") else None,
                shared_memory_bytes=12288 if step.kind == "triton_gemm" else 0,
                scope=step.scope,
                source="block.py:114",
                scopes=tuple((scope, "forward") for scope in (step.scope, *step.also)),
                op_name=f"jit(forward)/{step.scope}/op",
                opcodes=(("multiply", 3), ("convert", 2), ("reduce", 1)),
                inputs=inputs,
                outputs=(Value(name=step.name, shape=step.shape, bytes=step.size, producer=index),),
                bytes_read=read,
                bytes_written=step.size,
                flops=step.flops,
                unfused_bytes=round(moved * step.unfused),
                roofline_us=max(memory_us, compute_us) + 2.0,
                limiter="memory" if memory_us > compute_us else "compute",
                estimated_us=max(memory_us, compute_us) * 1.2 + 1.5,
                xla_estimate_us=memory_us * 1.2 if step.kind == "loop" else None,
                hlo="\n".join((f"{step.name} = {step.shape} fusion({', '.join(step.reads)}), kind=kLoop", step.hlo)),
            )
        )
        made[step.name] = index
        sizes[step.name] = (step.shape, step.size)
    return tuple(launches)


def intermediates_of(launches: tuple[Launch, ...]) -> tuple[Intermediate, ...]:
    """Every output that a later launch reads."""
    found = []
    for launch in launches:
        readers = tuple(other.index for other in launches for value in other.inputs if value.producer == launch.index)
        if readers:
            output = launch.outputs[0]
            found.append(
                Intermediate(
                    name=output.name,
                    shape=output.shape,
                    bytes=output.bytes,
                    producer=launch.index,
                    consumers=readers,
                    bytes_moved=output.bytes * (1 + len(readers)),
                )
            )
    return tuple(found)


_REASONS = {
    "cublas": ("library call", "[cuBLAS call: its operands and result are in HBM]", "gemm-rewriter"),
    "cublaslt": ("library call", "[cuBLASLt call: its operands and result are in HBM]", "gemm-rewriter"),
    "cudnn": ("library call", "[cuDNN call: its operands and result are in HBM]", "cudnn-fused-mha-rewriter"),
    "mosaic": ("custom kernel", "[custom call: XLA does not fuse into it]", "priority-fusion"),
    "triton_gemm": ("cost model: fusing is slower", "Fusing costs more than it saves", "priority-fusion"),
}


def decisions_of(launches: tuple[Launch, ...], intermediates: tuple[Intermediate, ...]) -> tuple[Decision, ...]:
    """One decision an edge between launches, and a fused one inside each fusion."""
    found = []
    for value in intermediates:
        for consumer in value.consumers:
            first, second = launches[value.producer], launches[consumer]
            library = next((_REASONS[launch.kind] for launch in (second, first) if launch.kind in _REASONS), None)
            category, reason, name = library or (
                "multiple consumers",
                f"{first.name} has more than one consumer and fusing would compute it twice",
                "priority-fusion",
            )
            found.append(
                Decision(
                    producer=first.name,
                    consumer=second.name,
                    verdict="rejected" if category.startswith("cost") else "ineligible",
                    reason=reason,
                    category=category,
                    pass_name=name,
                    gain_us=-151.0 if category.startswith("cost") else None,
                    producer_launch=first.index,
                    consumer_launch=second.index,
                    bytes=value.bytes,
                    shape=value.shape,
                    scope=first.scope,
                )
            )
    for launch in launches:
        if launch.unfused_bytes > launch.bytes_read + launch.bytes_written:
            found.append(
                Decision(
                    producer=f"convert.{launch.index}",
                    consumer=launch.name,
                    verdict="fused",
                    reason="Fusing saves time",
                    category="fused",
                    pass_name="priority-fusion",
                    gain_us=12.5,
                    producer_launch=launch.index,
                    consumer_launch=launch.index,
                    bytes=launch.outputs[0].bytes,
                    shape=launch.outputs[0].shape,
                    scope=launch.scope,
                )
            )
    return tuple(found)


def missed_of(launches: tuple[Launch, ...], intermediates: tuple[Intermediate, ...]) -> tuple[MissedFusion, ...]:
    """The intermediates ranked by bytes."""
    ranked = sorted(intermediates, key=lambda value: -value.bytes_moved)
    found = []
    for rank, value in enumerate(ranked[:8], start=1):
        ends = [launches[value.producer], *(launches[index] for index in value.consumers)]
        around = sum(launch.bytes_read + launch.bytes_written for launch in ends)
        attention = "attention" in ends[0].scope and "norm" not in ends[0].scope
        found.append(
            MissedFusion(
                rank=rank,
                value=value.name,
                shape=value.shape,
                producer=value.producer,
                consumers=value.consumers,
                bytes_at_stake=value.bytes_moved,
                time_at_stake_us=value.bytes_moved / 4.8e12 * 1e6 + 2,
                remaining_us=value.bytes_moved / 4.8e12 * 1e6 + 2,
                share=value.bytes_moved / around,
                reason="Triton GEMM fusions take elementwise prologues only; a softmax between two products is not one",
                category="no such fusion in XLA" if attention else "library call",
                remedy_kind="option" if attention else "kernel",
                remedy="Use cuDNN attention: jax.nn.dot_product_attention(implementation='cudnn'), strategy xla_cudnn"
                if attention
                else "A product with a fused epilogue keeps this value in registers",
                scope=ends[0].scope,
                source=f"block.py:{100 + value.producer}",
                options=(("xla_gpu_experimental_fuse", "true"),) if attention else (),
            )
        )
    return tuple(found)


def hotspots_of(launches: tuple[Launch, ...], missed: tuple[MissedFusion, ...]) -> tuple[Hotspot, ...]:
    """A slow launch, and a hotspot for each missed fusion."""
    slow = Hotspot(
        launches=(index := min(5, len(launches) - 1),),
        cause="A scatter adds 8192 rows into 2",
        needed_us=launches[index].roofline_us * 0.9,
        scope=launches[index].scope,
        source=launches[index].source,
        most_us=1500.0,
    )
    made = [
        Hotspot(
            launches=(), missed=(item.rank,), cause="A value goes through memory",
            stake_us=item.remaining_us, scope=item.scope, source=item.source, remedy_kind=item.remedy_kind,
            remedy=item.remedy, options=item.options, kernel=item.kernel, code=item.code, trial=item.trial,
        )
        for item in missed
    ]  # fmt: skip
    return timed((*made, slow), launches, missed)


TRIAL = Trial(
    change="attention by xlafuse.fuse",
    saved_launches=2,
    saved_bytes=3 * SCORES_BYTES,
    saved_us=1725.5,
    helps=True,
)
CODE = "from xlafuse.kernels import attention\n\nout = attention(query, key, value, is_causal=True)"


def with_trials(comparison: Comparison) -> Comparison:
    """The comparison whose baseline's remedies were tried: the first helps, the second does not, the third failed."""
    result = comparison[comparison.baseline]
    assert result.analysis is not None
    helps, useless, failed, *others = result.analysis.missed
    missed = (
        replace(helps, code=CODE, kernel="attention", remedy_kind="kernel", trial=TRIAL),
        replace(useless, trial=Trial(change="compiler option xla_gpu_experimental_fuse=true")),
        replace(failed, trial=Trial(change="rms_norm by xlafuse.fuse", error="the program has a custom_jvp here")),
        *others,
    )
    hotspots = hotspots_of(result.analysis.launches, missed)
    tried = replace(result, analysis=replace(result.analysis, missed=missed, hotspots=hotspots))
    return replace(comparison, strategies=tuple(tried if each is result else each for each in comparison.strategies))


def with_resources(comparison: Comparison) -> Comparison:
    """The comparison with registers, spills and occupancy of the baseline's launches that XLA compiled itself."""
    result = comparison[comparison.baseline]
    assert result.analysis is not None
    launches = tuple(
        launch
        if launch.kernel is None
        else replace(
            launch,
            registers=40 + launch.index,
            spill_bytes=8 * launch.index,
            occupancy=0.375,
            occupancy_limiter="registers",
        )
        for launch in result.analysis.launches
    )
    known = replace(result, analysis=replace(result.analysis, launches=launches))
    return replace(comparison, strategies=tuple(known if each is result else each for each in comparison.strategies))


def with_ptx(comparison: Comparison) -> Comparison:
    """The comparison with PTX of the kernels that XLA compiled itself; those of one name are one source."""
    results = []
    for result in comparison.strategies:
        if result.analysis is not None:
            names = sorted({launch.kernel for launch in result.analysis.launches if launch.kernel})
            launches = tuple(
                replace(launch, ptx=names.index(launch.kernel) if launch.kernel else None)
                for launch in result.analysis.launches
            )
            ptx = tuple(f".visible .entry {name}()  // </script>" for name in names)
            result = replace(result, analysis=replace(result.analysis, launches=launches, ptx=ptx))
        results.append(result)
    return replace(comparison, strategies=tuple(results))


def with_sites(comparison: Comparison) -> Comparison:
    """The comparison with two fused sites of its last strategy that has an analysis."""
    sites = (
        SiteRecord(operation="rms_norm", source="block.py:22", outcome="taken", implementation="mosaic", reason=""),
        SiteRecord(
            operation="attention",
            source="block.py:56",
            outcome="refused",
            implementation="",
            reason="the mask is neither causal nor a row of key lengths",
        ),
    )
    result = comparison["pallas"]
    extended = replace(result, sites=sites)
    return replace(comparison, strategies=tuple(extended if each is result else each for each in comparison.strategies))


def full_comparison() -> Comparison:
    """Everything that a page can show at once."""
    return with_ptx(with_sites(with_resources(with_trials(with_times(llama_comparison())))))


def analysis_of(
    steps: tuple[Step, ...], label: str, *, gemm_hits: int = 6, options: tuple[tuple[str, str], ...] = ()
) -> Analysis:
    """A whole analysis of the steps."""
    launches = launches_of(steps)
    intermediates = intermediates_of(launches)
    missed = missed_of(launches, intermediates)
    return Analysis(
        label=label,
        provenance=Provenance(
            function="TransformerBlock(llama3-8b)",
            mode="forward",
            arguments=("bf16[2,4096,4096]",),
            target="h200",
            gemm_choice="replayed",
            autotune_hits=gemm_hits,
            autotune_lookups=6,
            compiler_options=options,
            versions=(("jax", "0.11.2"), ("jaxlib", "0.11.2"), ("jax-cuda13-plugin", "0.11.2")),
            created="2026-11-20T10:00:00Z",
            lower_seconds=0.4,
            compile_seconds=2.1,
            notes=("Registers and spills are unknown: ptxas was not asked.",),
        ),
        device=H200,
        launches=launches,
        decisions=decisions_of(launches, intermediates),
        intermediates=intermediates,
        missed=missed,
        hotspots=hotspots_of(launches, missed),
        traffic=Traffic(
            bytes_read=sum(launch.bytes_read for launch in launches),
            bytes_written=sum(launch.bytes_written for launch in launches),
            flops=sum(launch.flops for launch in launches),
            unfused_bytes=sum(launch.unfused_bytes for launch in launches),
            intermediate_bytes=sum(value.bytes_moved for value in intermediates),
        ),
        memory=Memory(argument_bytes=570 << 20, output_bytes=X_BYTES, temp_bytes=5 << 30, peak_bytes=6 << 30),
        silent=(("p0", "parameter"),),
    )


def llama_comparison() -> Comparison:
    """Four strategies and one that failed, on the forward pass of a Llama-size block."""
    numerics = Numerics(shape="bf16[2,64,128]", dtype="bfloat16", error=0.0031, baseline_error=0.0029, passed=True)
    results = [
        StrategyResult(
            name=name,
            description=description,
            analysis=analysis_of(steps, name, options=options),
            numerics=numerics,
        )
        for name, description, steps, options in (
            ("unfused", "Fusion passes off", UNFUSED_STEPS, (("xla_disable_hlo_passes", "priority-fusion"),)),
            ("xla", "XLA as it comes", XLA_STEPS, ()),
            ("xla_cudnn", "cuDNN attention", CUDNN_STEPS, ()),
            ("pallas", "Our kernels at the norm sites", PALLAS_STEPS, ()),
        )
    ]
    failed = StrategyResult(
        name="xla_gemm_v2",
        description="XLA's second GEMM fusion",
        analysis=None,
        error="XLA said: INTERNAL: no such thing",
    )
    return compare_analyses("llama3-8b block, forward, B2 S4096", [*results, failed], baseline="xla", unfused="unfused")


def with_times(comparison: Comparison) -> Comparison:
    """The comparison with measured times: a fifth above the roofline, three times it in the first two launches."""
    timed = []
    for result in comparison.strategies:
        if result.analysis is not None:
            times = [
                LaunchTime(
                    launch=each.index,
                    name=each.name,
                    kernels=(each.kernel or "nvjet",),
                    median_us=each.roofline_us * (3 if each.index < 2 else 1.2),
                    samples=8,
                )
                for each in result.analysis.launches
            ]
            total = sum(time.median_us or 0 for time in times)
            measured = Measured(
                device="NVIDIA H200",
                source="bench",
                created="2026-11-22T14:34:16+00:00",
                calls=8,
                kernel_us=total,
                wall_us=total * 1.1,
                gap_us=24.0,
                compile_seconds=2.0,
                launches=tuple(times),
            )
            result = replace(result, analysis=with_measured(result.analysis, measured))
        timed.append(result)
    return replace(comparison, strategies=tuple(timed))


def hostile_comparison() -> Comparison:
    """The same words everywhere that a name can stand, all of them an attempt to break out of the page."""
    step = Step(
        name=HOSTILE, kind="loop", scope=f"block/{HOSTILE}", shape=HOSTILE, size=1024, reads=("x",), hlo=HOSTILE
    )
    second = replace(step, name=HOSTILE + "2", reads=(HOSTILE,))
    analysis = analysis_of((step, second), HOSTILE, options=((HOSTILE, HOSTILE),))
    provenance = replace(analysis.provenance, function=HOSTILE, notes=(HOSTILE,), versions=((HOSTILE, HOSTILE),))
    decisions = tuple(
        replace(decision, reason=HOSTILE, category=HOSTILE, pass_name=HOSTILE) for decision in analysis.decisions
    )
    trial = Trial(change=HOSTILE, helps=True)
    missed = tuple(
        replace(
            miss, reason=HOSTILE, remedy=HOSTILE, category=HOSTILE, source=HOSTILE, code=HOSTILE, kernel=HOSTILE,
            options=((HOSTILE, HOSTILE),), trial=trial,
        )
        for miss in analysis.missed
    )  # fmt: skip
    launches = tuple(replace(launch, source=HOSTILE, op_name=HOSTILE) for launch in analysis.launches)
    hotspots = tuple(replace(each, cause=HOSTILE, remedy=HOSTILE) for each in hotspots_of(launches, missed))
    analysis = replace(
        analysis, provenance=provenance, decisions=decisions, missed=missed, launches=launches, hotspots=hotspots
    )
    results = [
        StrategyResult(name=HOSTILE, description=HOSTILE, analysis=analysis),
        StrategyResult(name=HOSTILE + "!", description=HOSTILE, analysis=None, error=HOSTILE),
    ]
    return compare_analyses(HOSTILE, results, baseline=HOSTILE)
