"""The estimated time of a launch, from which both passes choose their configurations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pallas_kernels.primitives.platform import target_device

WORTH = 0.93
"""A form replaces a simpler one if its estimated time is below this share of the other's."""


def launch_cost(costs: Sequence[float], lanes: int) -> float:
    """The time until the last block of a launch ends, in the unit of `costs`.

    Blocks that cost the same run in whole rounds. Short ones fill the gaps that long ones leave, and a launch takes at
    least as long as its longest block.

    Args:
        costs: of the blocks of a lane. lanes: how many such lanes there are.
    """
    cores = target_device().core_count
    rounds = -(-lanes * len(costs) // cores)
    return max(max(costs), lanes * sum(costs) / cores, rounds * min(costs))


def cheapest[T](usual: T, others: Iterable[T], cost: Callable[[T], float]) -> T:
    """The usual form, or another one that costs clearly less; `others` from the fewest blocks to the most."""
    best, least = usual, cost(usual)
    for other in others:
        if (own := cost(other)) < WORTH * least:
            best, least = other, own
    return best
