"""Says why a launch takes longer than its bytes and its matrix products need: one rule a cause, the first decides."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from hlo_analysis.costs.estimate import needed_us
from hlo_analysis.costs.flops import Flops
from hlo_analysis.costs.slow_work import ALIGNED_BYTES, filter_channels, is_transposed
from hlo_analysis.hlo.attributes import convolution_labels, integers, product_precision, window
from hlo_analysis.hotspots import remedies
from hlo_analysis.hotspots.one_hot import one_hot_elements
from hlo_analysis.patterns.launch_patterns import (
    ROUNDS,
    SIXTEEN_BITS,
    calls_python,
    convolves,
    fills,
    has,
    is_product,
    only_casts,
    only_moves,
    shape_of,
)
from hlo_analysis.program.facts import LaunchRow, maker
from hlo_analysis.program.launch_kinds import COLLECTIVE_OPCODES, EMITTERS
from hlo_analysis.records import Device
from hlo_analysis.remedies import Remedy
from hlo_analysis.remedies.convolutions import is_short_depthwise
from hlo_analysis.remedies.texts import SHIFTED, TOP_K

Launches = Sequence[LaunchRow]

_FEW_ROWS = 1024
"""A one-hot product with more rows takes longer than sorting: 8192 rows of 1024 bf16 into 1024, 27 us on an H100."""
_CERTAIN = 1024
"""Where the rows are so many times fewer than the updates, most updates wait, wherever they fall: two rows of 1024
take 721 us even of random indices, nine times what spread ones take."""
_MANY_NUMBERS = 1.5
"""Times what the bytes need. Making bytes of words, another launch, took 129 us for 120 where it was 1.35 (a float32
array of 4096 x 8192 on an H100), and 86 for 120 where it was 2.7 (bfloat16)."""
_FEW_CHANNELS = 8
_LARGE_PRODUCT = 10**9
"""FLOPs from which a product belongs on the matrix units; for smaller ones, XLA's loops may be the better choice."""
_FEW_BLOCKS = 0.5
"""Of the multiprocessors: where fewer have a block, the others idle."""
_LARGE_BYTES = 10**6


@dataclass(frozen=True, kw_only=True)
class Cause:
    """Why launches take longer than they need.

    key: of the group that launches of this cause are in; by default those of one source line and of equal layers.
    needed_us: what one run of the launch needs, if that is not what its bytes and products say.
    most_us: the time of one run of the launch if the data is the worst that it can be, where bad data is certain.
    waits: whether the GPU waits for the host, for a time that nothing here estimates.
    takes_all: whether removing the cause saves what missed fusions between these launches have at stake.
    """

    text: str
    remedy: Remedy | None = None
    key: Hashable = None
    needed_us: float | None = None
    most_us: float | None = None
    takes_all: bool = False
    waits: bool = False


def _repeated_indices(launch: LaunchRow, launches: Launches, device: Device) -> Cause | None:
    """A scatter that combines what may fall into one row."""
    for scatter in launch.facts.of("scatter"):
        updates = launch.facts.operand(scatter, len(scatter.operands) - 1)
        into = launch.facts.operand(scatter, 0)
        combines = any(f"scatter{mark}{name}" in scatter.op_name for name in _COMBINED for mark in "-_")
        if updates is None or into is None or not combines or scatter.attributes.get("unique_indices") == "true":
            continue
        rows = prod(into.shape.dimensions[axis] for axis in integers(scatter, "scatter_dims_to_operand_dims"))
        count = updates.shape.element_count * rows // max(into.shape.element_count, 1)
        is_slow = updates.shape.element_type in SIXTEEN_BITS
        how = "by compare-and-swap, as there is no atomic addition of 16 bits" if is_slow else "atomically"
        text = f"a scatter adds {count} rows into {rows} {how}; additions to one row wait for each other"
        most = launch.longest_us
        if most is not None:
            text += f": up to {f'{most / 1000:.1f} ms' if most >= 1000 else f'{most:.0f} µs'} if all fall into one"
        return Cause(
            text=text,
            remedy=remedies.ONE_HOT_PRODUCT if rows <= _FEW_ROWS else remedies.SORTED_SUMS,
            most_us=most if count >= _CERTAIN * rows else None,
        )
    return None


_COMBINED = ("add", "mul", "min", "max")


def _random_bits(launch: LaunchRow, launches: Launches, device: Device) -> Cause | None:
    """Threefry, whose integer operations take longer than writing what it makes."""
    if dict(launch.opcodes).get("xor", 0) < ROUNDS or launch.repeat > 1:
        return None
    needed = needed_us(launch.bytes_moved, Flops(), device)
    text = "random numbers by threefry, about 100 integer operations each"
    if any("rematted_computation" in name for name in launch.facts.op_names("xor")):
        text += ", made again for the backward pass"
        return Cause(text=text, remedy=remedies.DRAWN_ONCE, key="drawn again", needed_us=needed)
    remedy = remedies.FOUR_OF_A_WORD if launch.estimated_us > _MANY_NUMBERS * needed else None
    return Cause(text=text, remedy=remedy, key="random", needed_us=needed)


def _exact_float32(launch: LaunchRow, launches: Launches, device: Device) -> Cause | None:
    """A product for which the program asks for exact float32."""
    asked = [each for each in launch.facts.instructions.values() if product_precision(each)[0]]
    if not asked or launch.flops < _LARGE_PRODUCT:
        return None
    needed = needed_us(launch.bytes_moved, Flops(matrix=(("f32", 3 * launch.flops),)), device)
    text = "a float32 product of the highest precision, which the matrix units do not compute"
    return Cause(text=text, remedy=remedies.THREE_PASSES, needed_us=needed)


def _widened_operands(launch: LaunchRow, launches: Launches, device: Device) -> Cause | None:
    """A float32 product of what are converted 16-bit values."""
    if not is_product(launch) or launch.flops < _LARGE_PRODUCT:
        return None
    calls = launch.facts.of("dot") or [each for each in (launch.facts.launched,) if each]
    types = [_narrow(name, launch, launches) for call in calls for name in call.operands[:2]]
    if len(types) < 2 or not all(types):
        return None
    matrix = Flops(matrix=((types[0], launch.flops),))
    return Cause(
        text=f"a float32 product of {types[0]} values, converted first: at half the rate of their own product",
        remedy=remedies.SIXTEEN_BITS,
        needed_us=needed_us(launch.bytes_moved, matrix, device),
    )


def _narrow(name: str, launch: LaunchRow, launches: Launches) -> str:
    """Returns the 16-bit type that an operand was converted from, inside the launch or before it; '' if from none."""
    found = launch.facts.instructions.get(name)
    while found and found.opcode in ("bitcast", "transpose", "reshape", "copy"):
        name = found.operands[0]
        found = launch.facts.operand(found, 0)
    if found and found.opcode == "convert":
        source = launch.facts.operand(found, 0)
        kind = source.shape.element_type if source else ""
        return kind if kind in SIXTEEN_BITS and found.shape.element_type == "f32" else ""
    made, _ = maker(launch, name, launches) or (None, None)
    if made is None or not only_casts(made) or shape_of(made.outputs[0].shape).element_type != "f32":
        return ""
    kinds = {shape_of(value.shape).element_type for value in made.inputs}
    return next(iter(kinds)) if len(kinds) == 1 and kinds <= set(SIXTEEN_BITS) else ""


def _without_matrix_units(launch: LaunchRow, launches: Launches, device: Device) -> Cause | None:
    """A product that XLA left to an emitter, which computes one element of the result a thread."""
    if launch.kind not in EMITTERS or launch.flops < _LARGE_PRODUCT or not launch.facts.of("dot", "convolution"):
        return None
    kinds = {found.shape.element_type for found in launch.facts.of("dot", "convolution")}
    matrix = Flops(matrix=((min(kinds), launch.flops),))
    return Cause(
        text="a product in XLA's loop emitter, one element of the result a thread, without matrix units. With "
        "autotuning (an attached GPU, or a recording of one) XLA first times the alternatives",
        needed_us=needed_us(launch.bytes_moved, matrix, device),
    )


def _poor_convolutions(launch: LaunchRow, launches: Launches, device: Device) -> Cause | None:
    """A convolution of a few channels, or of each channel alone."""
    if not convolves(launch):
        return None
    if is_short_depthwise(launch):
        text = "a convolution of each channel alone: cuDNN's kernels for it reach a small part of the bandwidth"
        return Cause(text=text, remedy=SHIFTED, key="depthwise")
    call = launch.facts.launched
    labels = convolution_labels(call) if call else None
    if call is None or labels is None:
        return None
    shapes = [shape_of(value.shape) for value in launch.inputs]
    shapes = [shape for shape in shapes if len(shape.dimensions) == len(labels[0])]  # others are seen through a bitcast
    channels = filter_channels(call, shapes) if len(shapes) > 1 else 0
    if not 1 < channels < _FEW_CHANNELS:
        return None
    apart = window(call).get("stride", "") == window(call).get("size")
    text = f"a convolution of {channels} channels: cuDNN's matrix kernels want 8 or more"
    return Cause(text=text, remedy=remedies.PATCHES if apart else remedies.MORE_CHANNELS)


def _one_hot_sums(launch: LaunchRow, launches: Launches, device: Device) -> Cause | None:
    """A reduction of a one-hot array that the launch makes itself: arithmetic, no traffic."""
    reduced = [launch.facts.operand(found, 0) for found in launch.facts.of("reduce")]
    most = max((each.shape.element_count for each in reduced if each), default=0)
    compares = [each for each in launch.facts.of("compare") if each.attributes.get("direction") == "EQ"]
    if not has(launch, "iota") or not compares or launch.bytes_read * 64 > most:
        return None
    shape = max((each.shape for each in compares), key=lambda shape: shape.element_count)
    size = f"{prod(shape.dimensions[:-1])} × {shape.dimensions[-1]}"
    is_gradient = any("log_softmax" in name for name in launch.facts.op_names("reduce"))
    return Cause(
        text=f"the rows of a one-hot array of {size} are summed, an element at a time",
        remedy=remedies.LOGSUMEXP if is_gradient else None,
        needed_us=device.efficiency.kernel_us,
    )


def _one_hot_products(launch: LaunchRow, launches: Launches, device: Device) -> Cause | None:
    """A product with a one-hot matrix, each row of which takes a row of the other factor, or none."""
    if not is_product(launch) or launch.flops < _LARGE_PRODUCT or not (ones := one_hot_elements(launch, launches)):
        return None
    summed = max(1, launch.flops // (2 * shape_of(launch.outputs[0].shape).element_count))  # more is a workspace
    moved = launch.bytes_moved - min(launch.bytes_read, 2 * ones)
    needed = needed_us(moved, Flops(), device)
    if min(summed, ones // summed) <= _FEW_ROWS or launch.needed_us < _MANY_NUMBERS * needed:
        return None
    text = f"a product with a one-hot matrix of {ones / 1e6:,.0f} million elements, which only moves rows"
    return Cause(text=text, remedy=remedies.MOVED_BY_INDEX, key="one-hot product", needed_us=needed)


def _small_iterations(launch: LaunchRow, launches: Launches, device: Device) -> Cause | None:
    """A loop's launch that takes longer to start than to work."""
    if launch.repeat <= 1 or launch.limiter != "overhead":
        return None
    text = f"a loop of {launch.repeat} iterations, whose launches take longer to start than to work"
    needed = max(launch.roofline_us - device.launch_overhead_us, 0.0)
    key = ("loop", launch.computation)
    return Cause(text=text, remedy=remedies.LARGER_ITERATIONS, key=key, needed_us=needed, takes_all=True)


def _sort_passes(launch: LaunchRow, launches: Launches, device: Device) -> Cause | None:
    """A pass of a sort; only the first is needed."""
    if launch.kind != "sort":
        return None
    passes = [each for each in launches if each.name == launch.name and each.kind == "sort"]
    if len(passes) < 2:
        return None
    takes_few = "top_k" in launch.op_name
    return Cause(
        text=f"a sort in {len(passes)} passes over all of it{', of which few elements are taken' if takes_few else ''}",
        remedy=TOP_K if takes_few else None,
        key=("sort", launch.name),
        needed_us=launch.needed_us if launch is passes[0] else 0.0,
    )


def _host_callbacks(launch: LaunchRow, launches: Launches, device: Device) -> Cause | None:
    """A call to Python."""
    if not calls_python(launch):
        return None
    text = "a call back to Python on the host: the GPU waits for it, and values that pass through it cannot be fused"
    return Cause(text=text, remedy=remedies.FEWER_CALLS, key=("callback", launch.source), waits=True)


def _few_blocks(launch: LaunchRow, launches: Launches, device: Device) -> Cause | None:
    """A kernel whose blocks leave most multiprocessors idle, though it has work for all."""
    blocks = prod(launch.grid) if launch.grid else 0
    moved = launch.bytes_moved
    if not 0 < blocks < _FEW_BLOCKS * device.core_count or moved < _LARGE_BYTES:
        return None
    idle = f"{device.core_count - blocks} of the GPU's {device.core_count} multiprocessors have nothing to do"
    return Cause(text=f"{kind_of_work(launch)}, in {blocks} blocks: {idle}")


def _exposed_link(launch: LaunchRow, launches: Launches, device: Device) -> Cause | None:
    """A collective whose time no computation hides."""
    if not launch.exposed_us or launch.limiter != "link":
        return None
    opcode = next((name for name, _ in launch.opcodes if name in COLLECTIVE_OPCODES), "collective")
    over = " and ".join(repr(name) for name, _ in launch.axes)
    where = f" over the mesh axis {over}" if over else ""
    what = f"an {opcode}{where}" if opcode.startswith("a") else f"a {opcode}{where}"
    joined = len(launch.inputs)
    if joined > 1 and opcode in remedies.APART:
        text = f"{what} of {joined} arrays that XLA joined, which other work does not hide"
        return Cause(text=text, remedy=remedies.APART[opcode])
    return Cause(text=f"{what}, which other work does not hide", remedy=remedies.SCHEDULED)


RULES: tuple[Callable[[LaunchRow, Launches, Device], Cause | None], ...] = (
    _repeated_indices,
    _random_bits,
    _exact_float32,
    _widened_operands,
    _without_matrix_units,
    _poor_convolutions,
    _one_hot_sums,
    _one_hot_products,
    _host_callbacks,
    _sort_passes,
    _small_iterations,
    _few_blocks,
    _exposed_link,
)
"""The most specific first."""


def kind_of_work(launch: LaunchRow) -> str:
    """Names the work of a launch that no rule knows a cause for."""
    if is_product(launch):
        types = shape_of(launch.inputs[0].shape).element_type if launch.inputs else ""
        complexes = " of complex numbers, as several real ones" if types.startswith("c") else ""
        shapes = [shape_of(value.shape) for value in launch.inputs]
        if types == "f32" and launch.facts.launched and is_transposed(launch.facts.launched, shapes):
            return "a float32 product whose operands are not contiguous along the sum, as matrix units read 32 bits"
        return f"a matrix product{complexes}"
    if convolves(launch):
        return "a convolution"
    if launch.kind == "sort" or has(launch, "sort"):
        return "a sort"
    if fills(launch):
        return "one value that is written everywhere"
    if only_moves(launch):
        return "data that is moved, transposed or padded"
    if has(launch, "reduce"):
        return _reduction(launch)
    return _KINDS.get(launch.kind, "element-wise work")


def _reduction(launch: LaunchRow) -> str:
    for found in launch.facts.of("reduce"):
        operand = launch.facts.operand(found, 0)
        if operand is None or not operand.shape.dimensions:
            continue
        fastest = operand.shape.minor_to_major[0]
        size = operand.shape.dimensions[fastest]
        reduced = integers(found, "dimensions")
        if fastest not in reduced:
            each = prod(operand.shape.dimensions[axis] for axis in reduced)
            turned = ", transposed as they are written" if has(launch, "transpose") else ""
            return f"sums over columns, of {each} elements each{turned}"
        if size * operand.shape.element_bytes % ALIGNED_BYTES:
            return f"a reduction of rows of {size} elements, which start at no multiple of 16 bytes"
    return "a reduction"


_KINDS: Mapping[str, str] = {
    "copy": "a copy", "memset": "a fill", "collective": "a collective", "cudnn": "a call of cuDNN",
    "mosaic": "a custom kernel", "jax_triton": "a custom kernel", "custom_call": "a custom call",
    "scatter": "a scatter", "transpose": "data that is transposed", "concatenate": "arrays that are joined",
}  # fmt: skip
