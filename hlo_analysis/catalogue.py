"""Kernels that remedies may name: `analyze(capture, catalogue=...)` takes them from whoever has some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hlo_analysis.errors import nearest_names
from hlo_analysis.program.facts import LaunchRow

PATTERNS = {
    "attention": "products of query, key and value with a softmax between them",
    "batch_norm": "a normalization over the rows of a batch",
    "cross_entropy": "the maximum, the sum and the logarithm of a row",
    "embedding": "a sum of rows into the rows of a table, at indices",
    "gated_linear": "two products of one input, one activated, multiplied with each other",
    "grouped_linear": "a product of groups of rows with a matrix for each group",
    "layer_norm": "a normalization of rows that subtracts their mean",
    "linear": "a product and element-wise work on its result",
    "linear_cross_entropy": "a product and the cross-entropy of its rows",
    "linear_residual_norm": "a product, a residual sum and a normalization of the sum",
    "lora_linear": "a product with a correction of low rank",
    "norm_linear": "a normalization of rows and a product of them",
    "padded_product": "a product with rows that begin between multiples of 16 bytes",
    "quantized_linear": "a product with weights that are widened from integers",
    "rms_norm": "a normalization of rows by their root mean square",
    "rope": "a rotation of pairs of a vector's elements, joined again",
    "softmax": "a softmax of rows",
}
"""What the analyzer recognizes and a kernel can replace, by name."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel that covers a pattern.

    name: as the user calls it.
    pattern: of `PATTERNS`.
    package: where it is imported from. Its source lines are not the user's.
    compute_capabilities: major compute capabilities of the GPUs that it runs on; none means all.
    unsupported: given the launches that it would replace, the producer first, says why it cannot (their shapes or
      dtypes), or None where it can, as far as they show. Of attention it is given the products.
    note: given the same launches, what the remedy's text says of them besides; "" for nothing.
    code: Python that calls it, for reports to show.
    call: given the same launches, the code with their arrays and options; "" where only `code` is known.

    Raises:
        ValueError: no such pattern.
    """

    name: str
    pattern: str
    package: str
    compute_capabilities: tuple[int, ...] = ()
    unsupported: Callable[[Sequence[LaunchRow]], str | None] = lambda launches: None
    note: Callable[[Sequence[LaunchRow]], str] = lambda launches: ""
    code: str = ""
    call: Callable[[Sequence[LaunchRow]], str] = lambda launches: ""

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise ValueError(
                f"expected a pattern of {', '.join(PATTERNS)}; got {self.pattern!r} for kernel {self.name!r}"
                f"{nearest_names(self.pattern, list(PATTERNS))}"
            )

    def refusal(self, launches: Sequence[LaunchRow]) -> str | None:
        """Returns why it cannot replace these launches, or None where it can, as far as they show."""
        return self.unsupported(launches)


Catalogue = Sequence[Kernel]


def kernels_for(catalogue: Catalogue, compute_capability: tuple[int, int]) -> Catalogue:
    """Those that run on a GPU; all where its capability is not known, (0, 0)."""
    major = compute_capability[0]
    return [kernel for kernel in catalogue if major in (0, *(kernel.compute_capabilities or (major,)))]
