"""One launch site to one row of the launch table, with the buffers that it reads and writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from hlo_analysis.costs.flops import Flops, flops_of
from hlo_analysis.costs.resources import Resources, kernel_name
from hlo_analysis.costs.roofline import bound, xla_estimate
from hlo_analysis.costs.traffic import Usage, pass_usage, usage_of
from hlo_analysis.hlo import Instruction, Module, SourceFrame, computation_text
from hlo_analysis.hlo.scope import scope_of
from hlo_analysis.program.dataflow import Dataflow, Path, Source, leaf_shape
from hlo_analysis.program.facts import LaunchFacts, LaunchRow, facts_of
from hlo_analysis.program.host_memory import without_host
from hlo_analysis.program.inplace_updates import updated_operand
from hlo_analysis.program.intermediates import Access
from hlo_analysis.program.launch_kinds import EMITTERS, kind_of, opcode_counts
from hlo_analysis.program.launch_sites import Site
from hlo_analysis.records import Device, LaunchKind, Phase, Value

# A Mosaic kernel's backend_config holds its whole module, some 75 KB: nothing that a reader of the HLO needs.
_LONGEST_ATTRIBUTE = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What every row of one program needs."""

    module: Module
    flow: Dataflow
    launch_of: Mapping[str, int]
    """Instruction → the last launch that it needs."""
    device: Device
    compiler_options: Mapping[str, str]
    library_packages: frozenset[str] = frozenset()
    """Packages whose source lines are not the user's, beside the installed ones."""
    resources: Mapping[int, Resources]
    """By index of the launch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A launch with its reads and writes, before they are paired into intermediates."""

    launch: LaunchRow
    writes: tuple[Access, ...] = ()
    reads: tuple[Access, ...] = ()


def launch_row(index: int, site: Site, context: Context) -> Row:
    """The row of one launch site."""
    module, thunk, instruction = context.module, site.thunk, site.instruction
    kind = kind_of(module, instruction, thunk.kind)
    if instruction is None:
        return _row_of_thunk(index, site, kind, context)
    whole = pass_usage(usage_of(module, site.computation, instruction), instruction, kind, site.step, site.steps)
    usage, host_bytes = without_host(whole, site.computation, instruction)
    reads, writes = _reads(index, site, usage, context), _writes(index, site, instruction, usage, context)
    bytes_read = sum(access.bytes for access in reads)
    flops = _arithmetic(site, instruction, kind, context)
    limit = bound(bytes_read + usage.bytes_written, flops, context.device)
    estimate = xla_estimate(instruction, kind, context.compiler_options) if site.steps == 1 else None
    resources = context.resources.get(index, Resources())
    shared = thunk.shared_memory_bytes
    op_name, frame = _origin(module, instruction, context.library_packages)
    scope, phase = scope_of(op_name)
    facts = facts_of(module, instruction)
    launch = LaunchRow(
        index=index,
        thunk_id=thunk.id,
        name=instruction.name,
        kernel=kernel_name(site),
        kind=kind,
        computation=context.flow.home(site.computation.name),
        repeat=site.repeat,
        grid=thunk.grid or resources.grid,
        block=thunk.block or resources.block,
        shared_memory_bytes=resources.shared_memory_bytes if shared is None else shared,
        scope=scope,
        phase=phase,
        source=f"{PurePosixPath(frame.file).name}:{frame.line}" if frame else None,
        op_name=op_name,
        scopes=scopes_of(facts, (scope, phase)),
        opcodes=opcode_counts(module, instruction),
        inputs=tuple(_value(access, context) for access in reads if access.usual),
        outputs=tuple(_value(access, context) for access in writes),
        bytes_read=bytes_read,
        bytes_written=usage.bytes_written,
        flops=flops.total,
        unfused_bytes=usage.unfused_bytes,
        host_bytes=host_bytes,
        roofline_us=limit.time_us,
        limiter=limit.limiter,
        xla_estimate_us=estimate[0] if estimate else None,
        xla_estimate_model=estimate[1] if estimate else None,
        registers=resources.registers,
        spill_bytes=resources.spill_bytes,
        hlo=_snippet(module, instruction),
        facts=facts,
    )
    return Row(launch=launch, writes=writes, reads=reads)


def _row_of_thunk(index: int, site: Site, kind: LaunchKind, context: Context) -> Row:
    """The row of a thunk whose instruction the module does not have: what the thunk itself says, and no traffic."""
    thunk = site.thunk
    launch = LaunchRow(
        index=index,
        thunk_id=thunk.id,
        name=thunk.kernel or f"thunk {thunk.id} ({thunk.kind})",
        kernel=thunk.kernel,
        kind=kind,
        computation=context.flow.home(site.computation.name),
        repeat=site.repeat,
        grid=thunk.grid,
        block=thunk.block,
        shared_memory_bytes=thunk.shared_memory_bytes,
        roofline_us=context.device.launch_overhead_us,
        limiter="overhead",
    )
    return Row(launch=launch)


def _arithmetic(site: Site, instruction: Instruction, kind: LaunchKind, context: Context) -> Flops:
    """What a launch computes. The passes of one instruction share its arithmetic: it is counted on the last."""
    if site.step < site.steps - 1:
        return Flops()
    flops = flops_of(context.module, site.computation, instruction)
    return flops.without_matrix_units() if kind in EMITTERS else flops


def _writes(index: int, site: Site, instruction: Instruction, usage: Usage, context: Context) -> tuple[Access, ...]:
    """What a launch writes, leaf by leaf of its result."""
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
    """What a launch reads, buffer by buffer: two operands that show one buffer read it once.

    Where a value may come from several places (a loop's first iteration, branches) the usual one has the bytes, and the
    others are listed with none.
    """
    instruction, computation = site.instruction, site.computation
    assert instruction is not None
    counts: dict[Source, int] = {}
    usual: set[Source] = set()
    own: set[Source] = set()
    for (position, path), count in usage.reads.items():
        name = instruction.operands[position] if position >= 0 else instruction.name
        first, *others = context.flow.sources(computation.name, name, path)
        counts[first] = counts.get(first, 0) + count
        usual.add(first)
        if position < 0:
            own.add(first)
        for other in others:
            counts.setdefault(other, 0)
    accesses: list[Access] = []
    for source, count in counts.items():
        written = context.module.computations[source.computation].instructions[source.instruction]
        shape = leaf_shape(written.shape, source.path)
        accesses.append(
            Access(
                launch=index,
                source=source,
                shape=str(shape),
                size=shape.byte_size,
                bytes=min(count, shape.byte_size),
                repeat=site.repeat,
                usual=source in usual,
                own=source in own,
            )
        )
    return tuple(accesses)


def _updates_argument(site: Site, instruction: Instruction, path: Path, context: Context) -> bool:
    """Whether a result is an argument's buffer that the launch updates in place."""
    operand = updated_operand(context.module, instruction, path)
    if operand is None:
        return False
    sources = context.flow.sources(site.computation.name, instruction.operands[operand])
    # In a loop the buffer comes from the iteration before, too: from this very launch.
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
    """JAX's name for a launch and the innermost user frame: the instruction's own, else those of what it computes."""
    candidates = [instruction]
    if instruction.opcode == "fusion":
        body = module.computations[instruction.called[0]]
        candidates += [body.root_instruction, *reversed(body.instructions.values())]
    op_name = next((found.op_name for found in candidates if found.op_name), "")
    frames = next((found.metadata.frames for found in candidates if found.metadata and found.metadata.frames), ())
    user = next((frame for frame in frames if not _is_library(frame.file, libraries)), frames[0] if frames else None)
    return op_name, user


# Instructions that compute nothing: XLA makes and names them as it likes, so that they say nothing about whose work a
# launch does. (Merged products get a concatenate of their weights that carries the name of the norm before them.)
_SILENT_OPCODES = frozenset(
    ("parameter", "constant", "bitcast", "broadcast", "iota", "tuple", "get-tuple-element", "copy", "concatenate",
     "slice", "dynamic-slice", "pad", "reshape", "transpose")
)  # fmt: skip


def scopes_of(facts: LaunchFacts, own: tuple[str, Phase]) -> tuple[tuple[str, Phase], ...]:
    """Scope and phase of every instruction of a fusion, in order; those that enclose the launch's own add nothing."""
    found: dict[tuple[str, Phase], None] = {}
    for instruction in facts.instructions.values() if facts.parameters else ():
        if instruction.op_name and instruction.opcode not in _SILENT_OPCODES:
            scope, phase = scope_of(instruction.op_name)
            if scope and not own[0].startswith(f"{scope}/"):
                found.setdefault((scope, phase))
    return tuple(found) if own in found else (own, *found)


def _is_library(file: str, libraries: frozenset[str]) -> bool:
    """Whether a file belongs to an installed package or to one of the libraries."""
    parts = PurePosixPath(file.replace("\\", "/")).parts
    return not ({"site-packages", "dist-packages"} | libraries).isdisjoint(parts)


def _snippet(module: Module, instruction: Instruction) -> str:
    """The instruction's text, and its fused computation's after it."""
    config = instruction.attributes.get("backend_config", "")
    text = instruction.text
    if len(config) > _LONGEST_ATTRIBUTE:
        text = text.replace(config, f"{{… {len(config)} characters …}}")
    if instruction.opcode == "fusion":
        text += "\n\n" + computation_text(module, instruction.called[0])
    return text
