"""Turns a Capture into the records that every report is made from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hlo_analysis.capture import Capture
from hlo_analysis.catalogue import Catalogue, kernels_for
from hlo_analysis.caveats import notes_of
from hlo_analysis.costs.link import mesh_of
from hlo_analysis.costs.memory import parse_buffer_assignment
from hlo_analysis.costs.occupancy import multiprocessor_limits
from hlo_analysis.costs.overlap import with_exposed
from hlo_analysis.costs.resources import Resources, ptx_by_kernel, read_resources, resources_of
from hlo_analysis.decisions import decide
from hlo_analysis.errors import DumpError, HloParseError
from hlo_analysis.hlo import Module, parse_module
from hlo_analysis.hlo.attributes import aliased_parameters
from hlo_analysis.hotspots import find_hotspots
from hlo_analysis.measured.run import measured_run
from hlo_analysis.missed import Program, rank
from hlo_analysis.program.dataflow import Dataflow, leaves
from hlo_analysis.program.intermediates import find_intermediates
from hlo_analysis.program.launch_rows import Context, launch_row, row_of_thunk, with_readers_scopes
from hlo_analysis.program.launch_sites import LaunchTable, find_launches, silent_instructions
from hlo_analysis.program.source_lines import source_lines
from hlo_analysis.records import Analysis, Intermediate, Launch, Memory, Traffic
from hlo_analysis.rules import attempt, failures_as_notes


def analyze(capture: Capture, *, label: str | None = None, catalogue: Catalogue = ()) -> Analysis:
    """Explains what the compiler did with the captured program.

    It reads the capture alone, and the text of the source lines that launches come from where those files are at hand.

    Args:
      capture: from `hlo_analysis.capture`, or `Capture.load`.
      label: a name for reports; by default the capture's own.
      catalogue: kernels that remedies may name; see `hlo_analysis.catalogue.Kernel`. Without a catalogue, a remedy only
        says what a kernel would do.

    Raises:
      TypeError: `capture` is not a Capture.
      DumpError: the capture has no final module, or its thunk list is cut off.
      HloParseError: its HLO text is not well formed.
    """
    if not isinstance(capture, Capture):
        raise TypeError(
            f"analyze takes a Capture, as capture(fn, *shapes) makes it or Capture.load(path) reads it; got "
            f"{type(capture).__name__}."
        )
    try:
        module, notes = _final_module(capture)
        table = find_launches(module, capture.text("thunk_sequence"), capture.text("thunk_metadata"))
        with failures_as_notes() as failures:
            analysis = _assemble(capture, module, table, label or capture.manifest.label, notes, catalogue)
            analysis = attempt(measured_run, analysis, analysis, capture)
    except HloParseError as error:
        message = f"{error.message} (in the HLO text of {capture.path}; was the dump cut off?)"
        raise HloParseError(message, line=error.line, column=error.column) from error
    return analysis.with_notes(*failures.values())


def _final_module(capture: Capture) -> tuple[Module, tuple[str, ...]]:
    """Returns the final module; if XLA stopped early, the last one before that, with a note that says so."""
    text = capture.text("final_hlo")
    if text is not None:
        return parse_module(text), ()
    for key in ("after_rename", "after_multi_output_fusion", "after_priority_fusion"):
        if (text := capture.text(key)) is not None:
            note = f"There is no final module: launches are those of the module {key.replace('_', ' ')}."
            return parse_module(text), (note,)
    raise DumpError(
        f"{capture!r} has no HLO text to analyse: expected 'final_hlo' or a dump after fusion, it has "
        f"{', '.join(capture.keys) or 'nothing'}. Dump with xla_dump_hlo_as_text=true."
    )


def _assemble(
    capture: Capture, module: Module, table: LaunchTable, label: str, notes: tuple[str, ...], catalogue: Catalogue
) -> Analysis:
    provenance = capture.manifest.provenance
    device = capture.manifest.device
    launch_of = {site.instruction.name: index for index, site in enumerate(table.sites) if site.instruction is not None}
    flow = Dataflow(module)
    resources = attempt(_resources, {}, capture, table)
    is_replayed, missing = provenance.gemm_choice == "replayed", provenance.autotune_lookups - provenance.autotune_hits
    ptx = tuple(dict.fromkeys(text for index in sorted(resources) if (text := resources[index].ptx)))
    context = Context(
        module=module,
        flow=flow,
        launch_of=launch_of,
        device=device,
        compiler_options=dict(provenance.compiler_options),
        library_packages=frozenset(kernel.package for kernel in catalogue),
        resources=resources,
        mesh=attempt(mesh_of, {}, module, capture.text("before_optimizations")),
        ptx=ptx,
        limits=attempt(multiprocessor_limits, None, capture.text("target_config")),
        is_tuned=provenance.gemm_choice == "attached" or (is_replayed and not missing),
        is_untuned=provenance.gemm_choice in ("default", "replayed") and missing > 0,
    )
    rows = [
        attempt(launch_row, None, index, site, context) or row_of_thunk(index, site, context)
        for index, site in enumerate(table.sites)
    ]
    launches = with_exposed(with_readers_scopes([row.launch for row in rows]), table.waits)
    outputs = _outputs(module, flow)
    intermediates = find_intermediates(
        [access for row in rows for access in row.writes], [access for row in rows for access in row.reads], outputs
    )
    decisions = attempt(decide, (), capture, module, launch_of)
    kernels = kernels_for(catalogue, capture.manifest.compute_capability)
    program = Program(
        launches=launches,
        intermediates=intermediates,
        decisions=decisions,
        device=device,
        outputs=outputs,
        donated=_donated(module),
        catalogue=kernels,
    )
    missed = attempt(rank, (), program)
    notes = (*provenance.notes, *notes, *table.notes, *notes_of(launches, device))
    return Analysis(
        label=label,
        provenance=replace(provenance, notes=notes),
        device=device,
        launches=tuple(launch.record() for launch in launches),
        decisions=decisions,
        intermediates=intermediates,
        missed=missed,
        hotspots=attempt(find_hotspots, (), launches, missed, device, kernels),
        traffic=_total(launches, intermediates),
        memory=attempt(_memory, Memory(), capture),
        silent=silent_instructions(module, table),
        ptx=ptx,
        source_lines=attempt(
            source_lines, (), module, {each.source for each in launches if each.source}, provenance.created
        ),
    )


def _resources(capture: Capture, table: LaunchTable) -> dict[int, Resources]:
    return resources_of(
        table.sites,
        mosaic=read_resources(capture.text("mosaic_resources")),
        ptx=read_resources(capture.text("ptx_resources")),
        sources=ptx_by_kernel(capture.ptx()),
    )


def _outputs(module: Module, flow: Dataflow) -> frozenset[str]:
    entry = module.entry
    return frozenset(
        source.name
        for path, _ in leaves(entry.root_instruction.shape)
        for source in flow.sources(entry.name, entry.root, path)
    )


def _donated(module: Module) -> frozenset[str]:
    """Returns the names of the arguments whose buffers hold results, from the module's `input_output_alias`."""
    aliased = aliased_parameters(module)
    return frozenset(p.name for number, p in enumerate(module.entry.parameters) if number in aliased)


def _total(launches: Sequence[Launch], intermediates: Sequence[Intermediate]) -> Traffic:
    """Sums over one run, counting each launch as often as it runs."""
    return Traffic(
        bytes_read=sum(launch.bytes_read * launch.repeat for launch in launches),
        bytes_written=sum(launch.bytes_written * launch.repeat for launch in launches),
        flops=sum(launch.flops * launch.repeat for launch in launches),
        unfused_bytes=sum(launch.unfused_bytes * launch.repeat for launch in launches),
        intermediate_bytes=sum(value.avoidable_bytes for value in intermediates),
    )


def _memory(capture: Capture) -> Memory:
    """Returns the memory use that the compiler reported, or else that of the buffer assignment."""
    memory = capture.manifest.memory
    text = capture.text("buffer_assignment")
    return parse_buffer_assignment(text) if memory == Memory() and text else memory
