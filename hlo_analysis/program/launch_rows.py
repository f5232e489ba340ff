"""Builds one row of the launch table from a launch site, with the buffers that it reads and writes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from hlo_analysis.costs.coalescing import cache_bytes
from hlo_analysis.costs.estimate import Work, estimate, longest, needed_us
from hlo_analysis.costs.flops import Flops, flops_of
from hlo_analysis.costs.link import group_axes, link_bytes
from hlo_analysis.costs.occupancy import MultiprocessorLimits, occupancy
from hlo_analysis.costs.pipeline import steps_of
from hlo_analysis.costs.resources import Resources, kernel_name
from hlo_analysis.costs.roofline import bound, xla_estimate
from hlo_analysis.costs.slow_work import (
    atomic_updates,
    cache_updates,
    executed_share,
    filled_tiles,
    filter_channels,
    has_unaligned_rows,
    is_transposed,
    loads_slowly,
    sums_columns,
)
from hlo_analysis.costs.traffic import Usage, pass_usage, usage_of
from hlo_analysis.hlo import Instruction, Module, SourceFrame, computation_text
from hlo_analysis.hlo.scope import scope_of
from hlo_analysis.program.dataflow import Dataflow, Path, Source, leaf_shape
from hlo_analysis.program.facts import LaunchFacts, LaunchRow, facts_of
from hlo_analysis.program.host_memory import without_host
from hlo_analysis.program.inplace_updates import updated_operand
from hlo_analysis.program.intermediates import Access
from hlo_analysis.program.launch_kinds import EMITTERS, is_attention, is_untuned_product, kind_of, opcode_counts
from hlo_analysis.program.launch_sites import Site
from hlo_analysis.program.thunks import Thunk
from hlo_analysis.records import Device, LaunchKind, OccupancyLimiter, Phase, Value

# A Mosaic kernel's backend_config holds its whole module, about 75 KB, which a reader of the HLO does not need.
_LONGEST_ATTRIBUTE = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The data of a program that every row is built from."""

    module: Module
    flow: Dataflow
    launch_of: Mapping[str, int]
    """Instruction → index of the last launch that it needs."""
    device: Device
    compiler_options: Mapping[str, str]
    library_packages: frozenset[str] = frozenset()
    """Packages, beside the installed ones, whose source lines are not the user's."""
    resources: Mapping[int, Resources]
    """Resources by index of the launch."""
    mesh: Mapping[str, int] = field(default_factory=dict)
    """Axes of the mesh of several GPUs."""
    ptx: Sequence[str] = ()
    """The program's PTX sources, each once."""
    limits: MultiprocessorLimits | None = None
    """Limits of the GPU's multiprocessors, None if unknown."""
    is_tuned: bool = False
    """Whether the tiles of all products are those that a GPU chose: it would take no others whose blocks wait."""
    is_untuned: bool = False
    """Whether XLA had no GPU to time products on: with one it would choose a library's for most of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A launch with its reads and writes, before they are paired into intermediates."""

    launch: LaunchRow
    writes: tuple[Access, ...] = ()
    reads: tuple[Access, ...] = ()


def launch_row(index: int, site: Site, context: Context) -> Row:
    """Builds the row of one launch site."""
    module, thunk, instruction = context.module, site.thunk, site.instruction
    if instruction is None:
        return row_of_thunk(index, site, context)
    kind = kind_of(module, instruction, thunk.kind)
    whole = pass_usage(usage_of(module, site.computation, instruction), instruction, kind, site.step, site.steps)
    usage, host_bytes = without_host(whole, site.computation, instruction)
    reads, writes = _reads(index, site, usage, context), _writes(index, site, instruction, usage, context)
    bytes_read = sum(access.bytes for access in reads)
    op_name, frame = _origin(module, instruction, context.library_packages)
    scope, phase = scope_of(op_name)
    operands = [site.computation.instructions[name].shape for name in instruction.operands]
    facts = facts_of(module, instruction, _sources(site.computation.name, instruction, context))
    is_slow = kind == "triton_gemm" and loads_slowly(facts.instructions)
    is_stand_in = context.is_untuned and not is_slow and is_untuned_product(instruction, kind)
    emitter: LaunchKind = "cublas" if is_stand_in else kind
    flops = _arithmetic(site, instruction, emitter, context)
    sent = link_bytes(module, instruction, bytes_read) if kind == "collective" else 0
    moved = bytes_read + usage.bytes_written
    limit = bound(moved, flops, context.device, sent)
    xla = xla_estimate(instruction, kind, context.compiler_options) if site.steps == 1 else None
    resources = context.resources.get(index, Resources())
    grid, kernel = thunk.grid or resources.grid, kernel_name(site)
    block, shared = thunk.block or resources.block, _shared_memory(thunk, resources)
    filled, limiter = _occupancy(block, resources.registers, shared, context.limits)
    is_product = kind == "triton_gemm" and context.is_tuned
    known = Resources() if is_stand_in else resources
    blocks, threads = ((), ()) if is_stand_in else (grid or (), block or ())
    work = Work(
        kind=emitter,
        repeat=site.repeat,
        bytes_moved=moved,
        flops=flops,
        grid=blocks,
        block=threads,
        instructions=known.instructions and round(known.instructions * executed_share(facts.instructions)),
        resident_warps=_resident_warps(filled, context.limits),
        atomic_updates=atomic_updates(facts.instructions),
        cache_updates=cache_updates(facts.instructions),
        steps=steps_of(instruction, facts.instructions, math.prod(block or ())) if is_product else None,
        sums_columns=kind == "reduction" and sums_columns(facts.instructions),
        loads_slowly=is_slow,
        unaligned=has_unaligned_rows(kind, operands, instruction.shape),
        transposed=is_transposed(instruction, operands),
        filter_channels=filter_channels(instruction, operands),
        filled=filled_tiles(instruction, context.device.core_count),
        attention=is_attention(instruction, kernel),
        cache_bytes=cache_bytes(module, instruction, emitter, math.prod((*(blocks or (0,)), *threads))),
        link_bytes=sent,
    )
    launch = replace(
        row_of_thunk(index, site, context).launch,
        kernel=kernel,
        kind=kind,
        grid=grid,
        block=block,
        shared_memory_bytes=shared,
        scope=scope,
        phase=phase,
        source=f"{PurePosixPath(frame.file).name}:{frame.line}" if frame else None,
        op_name=op_name,
        scopes=scopes_of(facts, (scope, phase)),
        opcodes=opcode_counts(module, instruction),
        inputs=tuple(_value(access, context) for access in reads if access.usual and not access.own),
        outputs=tuple(_value(access, context) for access in writes),
        bytes_read=bytes_read,
        bytes_written=usage.bytes_written,
        flops=flops.total,
        unfused_bytes=usage.unfused_bytes,
        host_bytes=host_bytes,
        link_bytes=sent,
        axes=group_axes(instruction, context.mesh) if kind == "collective" else (),
        roofline_us=limit.time_us,
        limiter=limit.limiter,
        estimated_us=estimate(work, context.device),
        longest_us=longest(work, context.device),
        xla_estimate_us=xla[0] if xla else None,
        xla_estimate_model=xla[1] if xla else None,
        registers=resources.registers,
        spill_bytes=resources.spill_bytes,
        instructions=resources.instructions,
        occupancy=filled,
        occupancy_limiter=limiter,
        hlo=_snippet(module, instruction),
        ptx=context.ptx.index(resources.ptx) if resources.ptx else None,
        facts=facts,
        needed_us=needed_us(moved, flops, context.device, attention=is_attention(instruction, kernel), link_bytes=sent),
    )
    return Row(launch=launch, writes=writes, reads=reads)


def row_of_thunk(index: int, site: Site, context: Context) -> Row:
    """Builds a row without traffic, for an instruction that the module does not have or that cannot be counted."""
    thunk = site.thunk
    launch = LaunchRow(
        index=index,
        thunk_id=thunk.id,
        name=site.instruction.name if site.instruction else thunk.kernel or f"thunk {thunk.id} ({thunk.kind})",
        kernel=thunk.kernel,
        kind=kind_of(context.module, None, thunk.kind),
        computation=context.flow.home(site.computation.name),
        repeat=site.repeat,
        grid=thunk.grid,
        block=thunk.block,
        shared_memory_bytes=thunk.shared_memory_bytes,
        roofline_us=context.device.launch_overhead_us,
        limiter="overhead",
        estimated_us=context.device.efficiency.kernel_us,
    )
    return Row(launch=launch)


def with_readers_scopes(launches: Sequence[LaunchRow]) -> list[LaunchRow]:
    """Gives a collective without a scope that of the first launch that reads it: XLA names gathered weights alone."""
    scopes: dict[int, tuple[str, Phase]] = {}
    for launch in launches:
        for value in launch.inputs if launch.scope else ():
            if value.producer is not None:
                scopes.setdefault(value.producer, (launch.scope, launch.phase))

    def named(launch: LaunchRow) -> LaunchRow:
        if launch.kind != "collective" or launch.scope or launch.index not in scopes:
            return launch
        scope, phase = own = scopes[launch.index]
        return replace(launch, scope=scope, phase=phase, scopes=tuple(dict.fromkeys((own, *launch.scopes))))

    return [named(launch) for launch in launches]


def _shared_memory(thunk: Thunk, resources: Resources) -> int | None:
    """Shared memory of a block: of XLA's kernels the thunk has the dynamic part and ptxas the static one."""
    known = [size for size in (thunk.shared_memory_bytes, resources.shared_memory_bytes) if size is not None]
    return sum(known) if known else None


def _occupancy(
    block: tuple[int, int, int] | None, registers: int | None, shared: int | None, limits: MultiprocessorLimits | None
) -> tuple[float | None, OccupancyLimiter | None]:
    if block is None or registers is None or shared is None or limits is None:
        return None, None
    return occupancy(limits, block=block, registers=registers, shared_memory_bytes=shared)


def _resident_warps(filled: float | None, limits: MultiprocessorLimits | None) -> float | None:
    return filled * limits.threads / limits.warp_size if filled and limits else None


def _arithmetic(site: Site, instruction: Instruction, kind: LaunchKind, context: Context) -> Flops:
    """Counts the FLOPs of a launch. The passes of one instruction share its FLOPs, which count on the last pass."""
    if site.step < site.steps - 1:
        return Flops()
    flops = flops_of(context.module, site.computation, instruction)
    return flops.without_matrix_units() if kind in EMITTERS else flops


def _writes(index: int, site: Site, instruction: Instruction, usage: Usage, context: Context) -> tuple[Access, ...]:
    """Returns the writes of a launch, one for each leaf of its result."""
    return tuple(
        Access(
            launch=index,
            source=Source(site.computation.name, instruction.name, path),
            shape=str(leaf_shape(instruction.shape, path)),
            size=leaf_shape(instruction.shape, path).byte_size,
            bytes=count,
            repeat=site.repeat,
            updates=_updates_argument(site, instruction, path, context),
        )
        for path, count in usage.writes.items()
    )


def _reads(index: int, site: Site, usage: Usage, context: Context) -> tuple[Access, ...]:
    """Returns the reads of a launch, one for each buffer: two operands that are views of one buffer read it once.

    Where a value may come from several sources (a loop's first iteration, branches), the usual source has the bytes and
    the others are listed with 0 bytes. A launch in a loop that updates its own result in place and reads nothing of it
    is no reader of it.
    """
    instruction, computation = site.instruction, site.computation
    assert instruction is not None
    counts: dict[Source, int] = {}
    usual: set[Source] = set()
    passed: set[Source] = set()
    for (position, path), count in usage.reads.items():
        name = instruction.operands[position] if position >= 0 else instruction.name
        first, *others = context.flow.sources(computation.name, name, path)
        counts[first] = counts.get(first, 0) + count
        usual.add(first)
        if position < 0:
            passed.add(first)
        for other in others:
            counts.setdefault(other, 0)
    accesses: list[Access] = []
    for source, count in counts.items():
        written = context.module.computations[source.computation].instructions[source.instruction]
        shape = leaf_shape(written.shape, source.path)
        is_result = (source.computation, source.instruction) == (computation.name, instruction.name)
        accesses.append(
            Access(
                launch=index,
                source=source,
                shape=str(shape),
                size=shape.byte_size,
                bytes=min(count, shape.byte_size),
                repeat=site.repeat,
                usual=source in usual,
                own=source in passed or (is_result and not count),
            )
        )
    return tuple(accesses)


def _sources(computation: str, instruction: Instruction, context: Context) -> dict[str, str]:
    """Maps each operand of a fusion to the value it usually is, followed through views and out of loops."""
    operands = instruction.operands if instruction.opcode == "fusion" else ()
    return {name: context.flow.sources(computation, name)[0].name for name in operands}


def _updates_argument(site: Site, instruction: Instruction, path: Path, context: Context) -> bool:
    """Whether a result is the buffer of a program argument that the launch updates in place."""
    operand = updated_operand(context.module, instruction, path)
    if operand is None:
        return False
    sources = context.flow.sources(site.computation.name, instruction.operands[operand])
    # In a loop, the buffer also comes from the previous iteration, that is from this launch itself.
    others = [source for source in sources if source.instruction != instruction.name]
    return bool(others) and not any(source.instruction in context.launch_of for source in others)


def _value(access: Access, context: Context) -> Value:
    return Value(
        name=access.source.name,
        shape=access.shape,
        bytes=access.size,
        producer=context.launch_of.get(access.source.instruction),
    )


def _origin(module: Module, instruction: Instruction, libraries: frozenset[str]) -> tuple[str, SourceFrame | None]:
    """Returns JAX's name and the innermost user frame of a launch, taken from the instruction or those it computes."""
    candidates = [instruction]
    if instruction.opcode == "fusion":
        body = module.computations[instruction.called[0]]
        candidates += [body.root_instruction, *reversed(body.instructions.values())]
    op_name = next((found.op_name for found in candidates if found.op_name), "")
    frames = next((found.metadata.frames for found in candidates if found.metadata and found.metadata.frames), ())
    user = next((frame for frame in frames if not _is_library(frame.file, libraries)), frames[0] if frames else None)
    return op_name, user


# Opcodes that compute nothing. XLA creates and names them freely, so their names do not say whose work a launch does.
# (Merged products get a concatenate of their weights that carries the name of the norm before them.)
_SILENT_OPCODES = frozenset(
    ("parameter", "constant", "bitcast", "broadcast", "iota", "tuple", "get-tuple-element", "copy", "concatenate",
     "slice", "dynamic-slice", "pad", "reshape", "transpose")
)  # fmt: skip


def scopes_of(facts: LaunchFacts, own: tuple[str, Phase]) -> tuple[tuple[str, Phase], ...]:
    """Returns the scopes and phases of a fusion's instructions in order, without scopes that enclose the launch's."""
    found: dict[tuple[str, Phase], None] = {}
    for instruction in facts.instructions.values() if facts.parameters else ():
        if instruction.op_name and instruction.opcode not in _SILENT_OPCODES:
            scope, phase = scope_of(instruction.op_name)
            if scope and not own[0].startswith(f"{scope}/"):
                found.setdefault((scope, phase))
    return tuple(found) if own in found else (own, *found)


def _is_library(file: str, libraries: frozenset[str]) -> bool:
    parts = PurePosixPath(file.replace("\\", "/")).parts
    return not ({"site-packages", "dist-packages"} | libraries).isdisjoint(parts)


def _snippet(module: Module, instruction: Instruction) -> str:
    """Returns the instruction's text, followed by that of its fused computation."""
    config = instruction.attributes.get("backend_config", "")
    text = instruction.text
    if len(config) > _LONGEST_ATTRIBUTE:
        text = text.replace(config, f"{{… {len(config)} characters …}}")
    if instruction.opcode == "fusion":
        text += "\n\n" + computation_text(module, instruction.called[0])
    return text
