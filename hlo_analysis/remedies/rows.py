"""Chooses the remedy for element-wise work and reductions of rows."""

from __future__ import annotations

from collections.abc import Sequence

from hlo_analysis.hlo.attributes import integers
from hlo_analysis.patterns.attention_scores import elements, last_size
from hlo_analysis.patterns.launch_patterns import (
    has,
    is_library_kernel,
    is_norm,
    is_residual_sum,
    is_softmax,
    normalizes,
    rotates,
    subtracts_row_maximum,
    sums_columns,
)
from hlo_analysis.program.facts import LaunchRow
from hlo_analysis.remedies import texts
from hlo_analysis.remedies.table import ROWS_PER_SUM, Table
from hlo_analysis.remedies.texts import Remedy


def of_rows(table: Table, producer: LaunchRow, readers: Sequence[LaunchRow]) -> Remedy:
    """The remedy where both ends are element-wise work and reductions."""
    if producer.phase == "backward" and all(reader.phase == "forward" and reader.op_name for reader in readers):
        return _elementwise(producer, readers)  # what an optimizer makes of a gradient is no norm
    # A small value is told by the sums that it was made of, a large one by those that its readers read beside it.
    largest = max(value.bytes for value in producer.outputs)
    is_small = largest * ROWS_PER_SUM <= max(reader.bytes_read for reader in readers)
    # The gradient of a norm's scale is a sum of what is scaled by the norm's root.
    is_scaled = producer.phase == "backward" and any(has(reader, "reduce") for reader in readers)
    near = [producer] if is_small else [producer, *readers] if is_scaled else readers
    ends = table.with_sums((producer, *readers), near)
    if not is_small and not any(_sums_up(end, producer) for end in ends):
        return _elementwise(producer, readers)  # what is normalized, if anything is, is another array
    if has(producer, "reduce") and not is_small and _keeps_sums(producer, ends):
        ends.remove(producer)
    rows = rows_remedy(table, ends)
    if rows is texts.BATCH_NORM and is_scaled and not is_small:
        return _elementwise(producer, readers)  # no kernel keeps the rows of a batch on the chip
    reducing = [end for end in (producer, *readers) if has(end, "reduce")]
    if rows in (texts.RMS_NORM, texts.LAYER_NORM) and is_residual_sum(producer):
        return rows
    is_done = rows.keeps_input and len(reducing) == 1 and is_norm(reducing[0])
    is_other = rows.keeps_input and len(readers) == 1 and not takes_part(table, producer)
    return _elementwise(producer, readers) if rows is texts.ONE_KERNEL or is_done or is_other else rows


def takes_part(table: Table, launch: LaunchRow) -> bool:
    """Whether a launch does part of a normalization or softmax of rows, or of its gradient."""
    near = (launch, *table.producers(launch, launch.bytes_read / ROWS_PER_SUM))
    is_scaled = any(has(found, opcode) for found in near for opcode in ("rsqrt", "exponential"))
    gives_sums = ROWS_PER_SUM * launch.bytes_written <= launch.bytes_read
    return is_scaled or (has(launch, "reduce") and (gives_sums or not sums_columns(launch)))


def _sums_up(launch: LaunchRow, producer: LaunchRow) -> bool:
    """Whether a launch reduces, and reads what the producer writes or is the producer."""
    reads = launch is producer or any(value.producer == producer.index for value in launch.inputs)
    return reads and has(launch, "reduce")


def _keeps_sums(producer: LaunchRow, ends: Sequence[LaunchRow]) -> bool:
    """Whether a launch writes sums beside a large array (as of a loss), and no other end reads these sums."""
    largest = max(value.bytes for value in producer.outputs)
    sums = {value.name for value in producer.outputs if value.bytes * ROWS_PER_SUM <= largest}
    return bool(sums) and not any(value.name in sums for end in ends for value in end.inputs)


def _elementwise(producer: LaunchRow, readers: Sequence[LaunchRow]) -> Remedy:
    """The remedy where neither a product nor a normalization or softmax is near."""
    if is_library_kernel(producer) or any(map(is_library_kernel, readers)):
        return texts.OWN_KERNEL
    is_joined = rotates(producer) and all(has(reader, "concatenate") for reader in readers)
    if is_joined or (has(producer, "sine") and all(map(rotates, readers))):
        return texts.ROPE
    return texts.ONE_KERNEL


def rows_remedy(table: Table, ends: Sequence[LaunchRow]) -> Remedy:
    """The remedy for launches of which some may reduce rows: by what they make of the sums."""
    if sums := [end for end in ends if has(end, "reduce")]:
        if any(map(normalizes, ends)) and not _clips(ends):
            centred = any(has(end, "subtract") for end in ends)
            if _sums_groups(table, sums):
                return texts.GROUP_NORM
            if all(map(sums_columns, sums)) and not _scales_sums(table, ends, sums):
                if _sums_instances(ends):
                    return texts.GROUP_NORM
                return texts.BATCH_NORM if centred else texts.ONE_KERNEL
            return texts.LAYER_NORM if centred else texts.RMS_NORM
        around = [*ends, *(producer for end in sums for producer in table.producers(end))]
        runs_on = any(has(end, "reduce-window") for end in ends)  # what sums up as it goes is made of a softmax
        if any(map(subtracts_row_maximum, around)) and not runs_on and not any(map(is_softmax, ends)):
            return texts.LOG_SOFTMAX if takes_logarithms(table, ends) else texts.SOFTMAX
    return texts.ONE_KERNEL


def _scales_sums(table: Table, ends: Sequence[LaunchRow], sums: Sequence[LaunchRow]) -> bool:
    """Whether a weight vector has the length of the summed axis: then rows are normalized that lie as columns."""
    lengths, left = set[int](), set[int]()
    for launch in sums:
        for reduction in launch.facts.of("reduce"):
            whole = launch.facts.operand(reduction, 0)
            if whole is not None and len(axes := integers(reduction, "dimensions")) == 1:
                lengths.add(whole.shape.dimensions[axes[0]])
                left |= {size for axis, size in enumerate(whole.shape.dimensions) if axis not in axes}
    around = [*ends, *(producer for end in ends for producer in table.producers(end))]
    given = {value for launch in around for value in launch.inputs if value.producer is None}
    weights = {elements(value) for value in given if elements(value) == last_size(value)}
    return not weights.isdisjoint(lengths - left)


def _sums_instances(ends: Sequence[LaunchRow]) -> bool:
    """Whether the roots of variances are more than one for each feature: those of each image, not of a batch."""
    largest = max(end.bytes_read for end in ends)
    roots = [
        value
        for end in ends
        if has(end, "rsqrt") and end.bytes_written * ROWS_PER_SUM <= largest
        for value in end.outputs
    ]
    return any(elements(value) > last_size(value) for value in roots)


def _clips(ends: Sequence[LaunchRow]) -> bool:
    """Whether it takes the minimum of a norm's inverse and one, as gradient clipping does."""
    largest = max(end.bytes_read for end in ends)
    return any(has(end, "minimum") and end.bytes_written * ROWS_PER_SUM <= largest for end in ends)


def takes_logarithms(table: Table, readers: Sequence[LaunchRow]) -> bool:
    """Whether there is a logarithm a few launches further on, as in the loss of a softmax."""
    near = {reader.index for reader in readers}
    for _ in range(3):
        near |= {launch.index for index in near for launch in table.readers.get(index, ())}
    return any(has(table.launches[index], "log") for index in near)


def _sums_groups(table: Table, sums: Sequence[LaunchRow]) -> bool:
    """Whether sums over columns are summed again over some of the columns, as those of a group normalization are."""
    columns = {launch.index for launch in sums if sums_columns(launch)}
    again = [
        reader
        for index in columns
        for reader in table.readers.get(index, ())
        # Those that read more than sums are of a normalization of rows behind it, as in a backward pass.
        if has(reader, "reduce") and ROWS_PER_SUM * reader.bytes_read <= table.launches[index].bytes_read
    ]
    return any(not sums_columns(sum_) and {value.producer for value in sum_.inputs} <= columns for sum_ in again)
