"""Makes the decision tree of when to fuse, with the studies' numbers on its edges."""

from __future__ import annotations

from collections.abc import Mapping

from xlafuse.studies.comparisons import FUSED, UNFUSED, XLA, ratios, span
from xlafuse.studies.records import StudyResult


def decision_tree(results: Mapping[str, StudyResult]) -> str:
    """Makes the tree as a nested Markdown list."""

    def gain(name: str, over: str = XLA, quantity: str = "us") -> str:
        result = results.get(name)
        found = list(ratios(result, FUSED, over, quantity).values()) if result else []
        return f" ({span(found)})" if found else " (not measured)"

    def slope() -> str:
        from xlafuse.studies.saved_bytes import slope as microseconds

        return f"{microseconds(results['saved_bytes']):.0f} µs" if "saved_bytes" in results else "some 300 µs"

    return f"""\
1. Does XLA already make one launch of it, with no value that goes through memory? `xlafuse report` says so: stop.
2. How large is the value in between? A gigabyte saved is {slope()} on an H200; a launch saved is worth what
   [launches](studies/launches.md) measures.
    - It is a matrix of scores that grows with the square of the length: always fuse
      ([attention](studies/attention.md): fewer bytes than XLA's{gain("attention", quantity="bytes")}).
    - It has the size of the input, and rows are reduced: fuse
      ([softmax](studies/softmax.md) over three kernels{gain("softmax", UNFUSED, "bytes")} fewer bytes).
3. Is there a matrix product?
    - With few tokens its weights set the time: fuse what reads them again or converts them
      ([int8](studies/int8.md){gain("int8")}, [q, k, v](studies/qkv.md){gain("qkv")}).
    - With many tokens arithmetic sets it: an epilogue gains little ([compute_bound](studies/compute_bound.md) over
      unfused{gain("compute_bound", UNFUSED)}; [mlp](studies/mlp.md) over XLA{gain("mlp")}).
    - A norm in front is best a row scale of the product, or a launch of its own
      ([norm_linear](studies/norm_linear.md){gain("norm_linear")}, [vertical](studies/vertical.md){gain("vertical")}).
4. Do the parts reduce over different axes, or over the whole batch? They stay apart
   ([incompatible](studies/incompatible.md)), or take two passes
   ([batch_norm](studies/batch_norm.md){gain("batch_norm")}).
5. Are more values live at once than registers hold? Cut it ([fuse_or_spill](studies/fuse_or_spill.md)).
6. Is it a loop of small steps? Unroll it, take its concatenates apart, and if it still counts, write one kernel
   ([cartpole](studies/cartpole.md)).
7. How often does it run? A kernel costs seconds to compile ([compile_time](studies/compile_time.md))."""
