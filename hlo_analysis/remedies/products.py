"""Chooses the remedy next to a matrix product."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from hlo_analysis.catalogue import Catalogue
from hlo_analysis.patterns.attention_scores import elements
from hlo_analysis.patterns.launch_patterns import (
    PRODUCTS,
    computes_groups,
    dequantizes,
    has,
    is_batched,
    is_product,
    normalizes,
    only_repeats,
)
from hlo_analysis.patterns.pair_patterns import (
    accumulates,
    adds_parts,
    gathers,
    is_known_before,
    normalizes_sum,
)
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.remedies import grouped, loop_texts, texts
from hlo_analysis.remedies.joined import split_weight
from hlo_analysis.remedies.low_rank import corrects
from hlo_analysis.remedies.rows import rows_remedy, takes_logarithms
from hlo_analysis.remedies.table import Table
from hlo_analysis.remedies.texts import Remedy


def of_products(
    table: Table, producer: LaunchRow, readers: Sequence[LaunchRow], *, of_attention: bool
) -> Remedy | None:
    """The remedy where one end is a matrix product, None where none is."""
    if is_product(producer):
        remedy = _after_product(table, producer, readers)
    elif any(map(is_product, readers)):
        remedy = _before_product(table, producer, readers)
    else:
        return None
    return texts.ATTENTION if remedy is texts.LINEAR_EPILOGUE and of_attention else remedy


def kept_value_remedy(table: Table, producer: LaunchRow, catalogue: Catalogue) -> Remedy:
    """Finds the remedy for an element-wise result that is kept and could be recomputed."""
    for product in filter(is_product, table.producers(producer)):
        if _after_product(table, product, [producer]) is texts.LINEAR_EPILOGUE:
            remedy = texts.LINEAR_KEEPS_PRODUCT.named(catalogue, (product, producer))
            if remedy.kernel:
                return remedy
    return texts.CHECKPOINTED


def _before_product(table: Table, producer: LaunchRow, readers: Sequence[LaunchRow]) -> Remedy:
    if any(map(computes_groups, readers)):
        return grouped.of_operand(table, readers)
    if dequantizes(producer):
        return texts.QUANTIZED
    written = max(value.bytes for reader in readers for value in reader.outputs)
    if only_repeats(producer) and all(map(is_batched, readers)) and producer.bytes_written > written:
        return texts.UNREPEATED
    if remedy := split_weight(table, producer, readers):
        return remedy
    # A product can scale rows that it reads whole; a group of channels is no row, nor is a feature of a batch.
    of_rows = rows_remedy(table, table.with_sums([producer], [producer])) not in (texts.GROUP_NORM, texts.BATCH_NORM)
    scales = normalizes(producer) and producer.phase == "forward" and of_rows
    return texts.NORM_LINEAR if scales else texts.LINEAR_PROLOGUE


def _after_product(table: Table, product: LaunchRow, readers: Sequence[LaunchRow]) -> Remedy:
    # In a GRU's loop, whose products have few tiles, whole sums took 5 % longer on an H200.
    if product.repeat == 1 and any(adds_parts(product, reader) for reader in readers):
        return texts.WHOLE_SUM
    if remedy := summed_in_a_loop(table, product, readers):
        return remedy
    if is_known_before(product, table.producers(product)):
        return loop_texts.HOISTED
    if corrects(table, product, readers):
        return texts.LORA_LINEAR
    if any(_gates(reader, table.launches) for reader in readers):
        return grouped.EPILOGUE if computes_groups(product) else texts.GATED_LINEAR
    if all(map(is_product, readers)):
        return texts.ONE_KERNEL
    is_softmax = all(any(has(reader, opcode) for reader in readers) for opcode in ("exponential", "reduce"))
    is_loss = is_softmax and (takes_logarithms(table, readers) or _is_for_gradients(table, product, readers))
    if is_loss and product.phase == "forward" and not _needs_every_logit(table, product, readers):
        return texts.LINEAR_CROSS_ENTROPY
    scatters = 2 * sum(has(reader, "scatter") for reader in readers) >= len(readers)
    if scatters or any(gathers(reader, product) for reader in readers):
        return texts.EPILOGUE  # that takes indices
    if any(normalizes_sum(product, reader) for reader in readers):
        return texts.RESIDUAL_NORM
    if any(has(reader, "reduce") and reader.kind in ("reduction", "triton") for reader in readers):
        return _reduced(table, product, readers)
    if computes_groups(product):
        return grouped.EPILOGUE
    return texts.LINEAR_EPILOGUE if product.phase == "forward" else texts.EPILOGUE


def _reduced(table: Table, product: LaunchRow, readers: Sequence[LaunchRow]) -> Remedy:
    """The remedy where a product is reduced: the norm's own in several launches, which reads it once."""
    rows = rows_remedy(table, table.with_sums(readers, readers))
    if rows is texts.RMS_NORM and product.phase == "forward" and any(has(reader, "add") for reader in readers):
        return texts.RESIDUAL_NORM
    return rows if rows in (texts.RMS_NORM, texts.LAYER_NORM) and len(readers) > 1 else texts.REDUCED_PRODUCT


def summed_in_a_loop(table: Table, producer: LaunchRow, readers: Sequence[LaunchRow]) -> Remedy | None:
    """The remedy where each run of a loop adds a product of its own to one array; None elsewhere.

    So does a scan's backward pass with a weight's gradient, and what accumulates whole gradients, part by part.
    """
    for end in (producer, *readers):
        products = [found for found in (end, *table.producers(end)) if is_product(found)]
        # What the next step computes with cannot wait for the last.
        users = [user for user in table.readers.get(end.index, ()) if user.computation == end.computation]
        if end.repeat > 1 and products and accumulates(end) and all(user is end for user in users):
            return loop_texts.SUMMED_AFTER
    return None


def _is_for_gradients(table: Table, product: LaunchRow, readers: Sequence[LaunchRow]) -> bool:
    """Whether the forward pass takes nothing but sums of a product that the backward pass reads, too.

    So is a loss where gradients alone are wanted, and nobody reads the logarithm.
    """
    sums = all(2 * reader.bytes_written < product.bytes_written for reader in readers)
    return sums and any(reader.phase == "backward" for reader in table.readers.get(product.index, ()))


def _needs_every_logit(table: Table, product: LaunchRow, readers: Sequence[LaunchRow]) -> bool:
    """Whether an array as large as the logits is computed from them and then returned, or sorted for the largest."""
    large = [reader for reader in readers if 2 * reader.bytes_written >= product.bytes_written]
    users = [table.readers.get(reader.index, ()) for reader in large]
    return any(not found or any(user.kind == "sort" for user in found) for found in users)


def shared_input_remedy(readers: Sequence[LaunchRow]) -> Remedy | None:
    """The remedy for launches that each read one value; None where one launch could not do all their work."""
    if any(map(is_product, readers)):
        return None if all(map(is_product, readers)) else texts.MERGE_LOOPS
    stacks = [reader for reader in readers if reader.repeat > 1 and has(reader, "dynamic-update-slice")]
    if not stacks or 2 * len(stacks) < len(readers):
        return texts.MERGE_LOOPS
    is_for_gradient = any("jvp(" in stack.op_name for stack in stacks)
    return loop_texts.RECOMPUTED if is_for_gradient else loop_texts.UNROLLED


def _gates(launch: LaunchRow, launches: Sequence[LaunchRow]) -> bool:
    """Whether an element-wise launch multiplies two products of one input, one of them activated, or two halves of one.

    The gates of a recurrent cell are sums of products of different inputs, cut into four.
    """
    products = [launches[index] for index in launch.producers if launches[index].kind in PRODUCTS]
    shared = set[str].intersection(*({value.name for value in found.inputs} for found in products)) if products else ()
    is_pair = shared if len(products) > 1 else products and _cuts_in_halves(launch, products[0])
    activates = _activates(launch, {found.name for found in products})
    is_elementwise = launch.phase == "forward" and not has(launch, "reduce")
    return bool(is_pair) and activates and is_elementwise and has(launch, "multiply")


def _activates(launch: LaunchRow, products: Collection[str]) -> bool:
    """Whether an activation is of what products made, and not of a decay that they are scaled by."""
    opcodes = {"logistic", "exponential", "tanh", "erf"}
    activations = launch.facts.of(*opcodes)
    if not activations:
        return any(has(launch, opcode) for opcode in opcodes)
    return any(origins & set(products) for found in activations for origins in launch.facts.operand_origins(found))


def _cuts_in_halves(launch: LaunchRow, product: LaunchRow) -> bool:
    """Whether a launch cuts a product in two. It may cut other things: a column, the key of random numbers."""
    cuts = [found.shape.element_count for found in launch.facts.of("slice")]
    halves = [cut for cut in cuts if 2 * cut == elements(product.outputs[0])]
    return len(halves) in (1, 2) if cuts else dict(launch.opcodes).get("slice", 0) in (1, 2)
