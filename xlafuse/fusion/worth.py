"""Leaves to XLA what a kernel of its own would make slower.

XLA fuses operations on rows and elements with their neighbours. A kernel there reads an array that XLA computes on the
way, or writes one that XLA uses on the way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import jax

from pallas_kernels.ops.linear_cross_entropy.config import columns_for
from pallas_kernels.primitives.platform import target_device
from xlafuse.fusion.binding import Binding, has_all, is_permuted
from xlafuse.fusion.graph import LAYOUTS, Equation, Graph, Value, behind
from xlafuse.fusion.odd_sizes import padding_for
from xlafuse.fusion.prepare import Normed
from xlafuse.fusion.site import NORMS, Refusal, Site, structs_of
from xlafuse.fusion.spellings import OF_GRADIENTS
from xlafuse.fusion.terms import ELEMENTWISE

_STREAMING = frozenset(("rms_norm", "layer_norm", "softmax", "bias_activation", "gated_activation"))
"""Operations that take as long as it takes to read and write their arrays."""
_READING = _STREAMING | {"cross_entropy"}
"""Those that read large arrays."""
_ELEMENTWISE = ("bias_activation", "gated_activation")
"""Those that compute each element by itself."""
_LAUNCH_BYTES = 2**18
"""Bytes in which a kernel takes as long as a launch of nothing.

In a token of generation of 8 sequences, norms and rotations of 16 to 64 KB took launches that XLA does not need: on an
H200, `fuse` gained 1.4 % of 14 layers of Qwen 3 with them and 3.8 % without, and of Gemma 3 -1.3 % and 6.8 %.
"""
_APART = frozenset((
    "conv_general_dilated", "custom_vjp_call", "dot_general", "ffi_call", "fft", "pallas_call", "scan", "sort", "top_k",
    "while",
))  # fmt: skip
"""Primitives that XLA computes in launches of their own, apart from elementwise operations on either side.

Compiled for the H200, tanh is fused with ragged_dot, gather, concatenate, pad, cumsum, reduce_window and slices.
"""
_WRITTEN = _APART | {"scatter", "scatter-add", "scatter-mul", "scatter-max", "scatter-min"}
"""Those whose results XLA writes to memory; a scatter takes in what computes its updates."""
_WITH_EPILOGUE = ("dot_general", "conv_general_dilated")
_EXPANDED = {"ragged_dot", "ragged_dot_general"}
"""What XLA expands to one product for all experts, after a loop that masks the rows and before one that sums."""
_FUSIBLE = ELEMENTWISE | _EXPANDED | {"add", "sub", "mul", "div", "square", "integer_pow", "rsqrt", "custom_jvp_call"}
"""What XLA fuses with norms and softmax on either side."""


def worthwhile(
    graph: Graph,
    sites: Sequence[Site],
    implementation: Callable[[Site], str | None],
    *,
    keeps_all: bool,
    pads: bool = True,
) -> tuple[list[Site], list[Site], list[Refusal]]:
    """Returns the sites to call an operation at, those to leave as they are written, and refusals.

    A site whose operation would run by XLA stays as it is written. On a CPU all sites are called, and run by XLA.

    implementation: returns what the operation of a site takes. keeps_all: calls kernels also where XLA fuses more.
    pads: whether products of odd sizes are padded.
    """
    if target_device().platform == "cpu":
        return list(sites), [], []
    called = [site for site in sites if implementation(site) != "xla"]
    written = [site for site in sites if site not in called]
    refused: list[Refusal] = []
    changes = not keeps_all
    while changes:
        changes = False
        for site in [each for each in called if each.operation in _READING | {"rope"} or _is_activated(each)]:
            reason = _Neighbours(graph, called, pads=pads).reason(site)
            if reason is not None:
                called.remove(site)
                changes = True
                if (of_sum := _of_sum(site)) is not None and implementation(of_sum) != "xla":
                    called.append(of_sum)
                    continue
                value, covered = site.results[0], site.covered | site.shared
                refused.append(Refusal(operation=site.operation, value=value, reason=reason, covered=covered))
    return called, written, refused


def with_gradients_only(graph: Graph, sites: Sequence[Site]) -> tuple[Site, ...]:
    """Returns the sites, with norms left to XLA where they are not differentiated if their kernels pay only there.

    These are norms of a sum that nothing else reads, which the kernel writes and XLA does not (8 MB more of 69 in two
    norms of 4096 x 1024, and 121 MB less of 384 in gradients), of what XLA may compute again in each reader, and of an
    array that XLA transposes on the way.
    """
    around = _Neighbours(graph, sites)
    return tuple(
        replace(site, results=site.results[:1], orders=site.orders[:1], is_for_gradients=True)
        if site.operation in NORMS and around.is_written_for(site)
        else site
        for site in sites
    )


def _of_sum(norm: Site) -> Site | None:
    """Returns a norm of a sum without the sum, which XLA then computes with what computes its sides, such as dropout.

    The norm's gradient by XLA reads and writes more: the gradient of a sublayer of 8192 x 1024 with dropout moves 1434
    MB without the kernel, and 1312 with it.
    """
    if norm.operation not in NORMS or "residual" not in norm.arrays:
        return None
    total = norm.results[1]
    arrays = {name: each for name, each in norm.arrays.items() if name != "residual"}
    return replace(
        norm,
        arrays={**arrays, "x": replace(norm.arrays["x"], value=total)},
        results=norm.results[:1],
        orders=norm.orders[:1],
        covered=norm.covered - {total.equation},
    )


COPIES = "a kernel would need copies of weights that XLA casts or transposes on the way, larger than what it saves"
_WEIGHTS = ("w", "w_gate", "w_up", "w_q", "w_k", "w_v")


def copies_more(site: Site) -> bool:
    """Returns whether a product's kernel writes more bytes of weights than it keeps others out of memory.

    XLA casts or transposes a weight on its way to the tensor cores; a kernel reads what is written in memory. With a
    norm, it keeps the normed x, and with something after the product, the product. norm_linear of 4096 rows of 1024 and
    32,000 outputs keeps 17 MB and copies 131 MB of a weight in float32, 31 % of the program's bytes. On several devices
    it counts one device's parts: rows that are cut four ways keep a quarter, and copy whole weights.
    """
    copied = [name for name in _WEIGHTS if name in site.arrays and _is_copied(site.arrays[name], site)]
    if not copied:
        return False
    parts = {name: _part(each) for name, each in structs_of(site).items()}
    x = parts["x" if "x" in parts else "hidden"]
    is_alone = site.operation in ("linear", "norm_linear") and not _has_epilogue(site)
    rows = 0 if is_alone else math.prod(x[:-1])
    products = sum(rows * parts[name][1] for name in _WEIGHTS if name in parts)
    kept = products + (math.prod(x) if isinstance(site.prepare, Normed) else 0)
    return sum(math.prod(parts[name]) for name in copied) > kept


def _part(struct: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    """Returns the shape of one device's part of an array, where explicit mesh axes cut it."""
    return struct.shape if struct.sharding is None else struct.sharding.shard_shape(struct.shape)


def _has_epilogue(site: Site) -> bool:
    return "activation" in site.options or not {"bias", "residual"}.isdisjoint(site.arrays)


def _is_copied(weight: Binding, site: Site) -> bool:
    """Returns whether a weight is a cast, transposition or padding of an array that nothing else needs written."""
    if site.operation == "linear_cross_entropy" and weight.shape[1] != columns_for(weight.shape[1]):
        return True
    value = weight.value
    is_cast = value.equation is not None and _narrows(value.equation)
    return (is_cast and all(_leads_to(user, site) for user in value.users)) or is_permuted(weight.order)


def _leads_to(user: Equation, site: Site) -> bool:
    """Returns whether an equation is part of a site, or a layout that only the site reads."""
    if user in site.covered:
        return True
    return user.primitive in LAYOUTS and all(_leads_to(each, site) for each in user.outputs[0].users)


class _Neighbours:
    """What is around the sites of a graph."""

    def __init__(self, graph: Graph, called: Sequence[Site], *, pads: bool = False):
        self._returned = set(graph.outputs)
        self._pads = pads
        kernels = [site for site in called if site.operation not in OF_GRADIENTS]
        self._owners = {equation: site for site in kernels for equation in site.own}

    def reason(self, site: Site) -> str | None:
        """Returns why XLA should compute a site, or None."""
        if _is_activated(site):
            return self._activation_reason(site)
        if _bytes(site) < _LAUNCH_BYTES:
            return "a kernel of so few bytes takes as long as a launch, and XLA fuses it with its neighbours"
        if site.operation == "rope":
            return None
        producer = behind(site.arrays["x"].value) if site.operation == "bias_activation" else None
        if producer is not None and producer.primitive in _WITH_EPILOGUE:
            return f"XLA does it in the epilogue of {producer.primitive}; a kernel would write and read x once more"
        if site.operation == "gated_activation" and self._is_of_one_product(site):
            return "XLA may make one product of gate and up; a kernel would then need a copy of each"
        largest = max(math.prod(binding.shape) for binding in site.arrays.values())
        for name, binding in site.arrays.items():
            producer = self._fusible_producer(site, binding.value)
            is_large = 2 * math.prod(binding.value.shape) >= largest
            if is_large and self._is_of_padded_product(binding):
                return f"{name} is a part of a padded product, which XLA fuses it with; a kernel would need a copy"
            if is_large and _is_sliced(binding):
                return f"XLA fuses it with the slice that {name} is; a kernel would need a copy of that"
            is_sum = site.operation in NORMS and binding.value.equation is producer and _adds_two(producer)
            if producer is not None and is_large and self._readers(producer.outputs[0]) <= site.covered and not is_sum:
                return (
                    f"XLA fuses it with {producer.primitive}, which computes {name}; a kernel would read {name} again"
                )
        return self._fusing_readers(site) if site.operation in _STREAMING else None

    def _is_of_padded_product(self, binding: Binding) -> bool:
        product = behind(binding.value).equation
        is_outside = product is not None and product.primitive == "dot_general" and product not in self._owners
        return self._pads and product is not None and is_outside and padding_for(product) is not None

    def _fusing_readers(self, site: Site) -> str | None:
        result = site.results[0]
        readers = self._readers(result)
        if result in self._returned or not readers:
            return None
        if all(map(self._is_fusible, readers)) or (
            site.operation in _ELEMENTWISE and any(map(self._takes_in, readers))
        ):
            names = ", ".join(sorted({each.primitive for each in readers}))
            return f"XLA fuses it with what reads its result ({names}); a kernel would write the result once more"
        if all(map(_narrows, result.users)):
            narrow = result.users[0].outputs[0].dtype
            return f"its result is only read as {narrow}, which XLA writes; a kernel would write {result.dtype}"
        return None

    def _activation_reason(self, site: Site) -> str | None:
        """Returns why an activation should stay out of its product.

        Gradients of the kernel keep the result and x @ w, as XLA's do where products read the result. Elsewhere XLA
        keeps x @ w alone, and applies the activation once more in the reader. Of relu it keeps a byte for each sign:
        the gradient of two layers of 4096 x 1024 x 1024 moves 231 MB, and 258 MB with the kernel.
        """
        if site.options["activation"] == "relu":
            return "XLA applies relu in the product's launch and keeps its sign for gradients; a kernel keeps x @ w"
        readers = [each for each in self._readers(site.results[0]) if self._takes_in(each)]
        if not readers:
            return None
        names = ", ".join(sorted({each.primitive for each in readers}))
        return f"XLA fuses its activation with what reads the result ({names}); gradients would keep one more array"

    def _is_of_one_product(self, site: Site) -> bool:
        """Returns whether gate and up are products of one array, outside the sites; XLA joins small ones."""
        producers = [behind(site.arrays[name].value).equation for name in ("gate", "up")]
        products = [each for each in producers if each is not None and each.primitive == "dot_general"]
        if len(products) < 2 or any(each in self._owners for each in products):
            return False
        first, second = (set(each.inputs) for each in products)
        return not first.isdisjoint(second)

    def _fusible_producer(self, site: Site, value: Value) -> Equation | None:
        """Returns the equation outside the sites that computes a value, in any layout, if XLA fuses it with a site."""
        value = behind(value)
        producer = value.equation
        is_outside = producer is not None and producer not in self._owners and not producer.is_constant
        if not is_outside or value in self._returned:
            return None
        if site.operation in _ELEMENTWISE:
            return producer if value.primitive not in _WRITTEN else None
        return producer if value.primitive in _FUSIBLE else None

    def _readers(self, value: Value) -> set[Equation]:
        """Returns the equations that read a value, directly or through reshapes and transposes."""
        found = set[Equation]()
        for user in value.users:
            is_layout = user.primitive in LAYOUTS and self._returned.isdisjoint(user.outputs)
            found |= set().union(*map(self._readers, user.outputs)) if is_layout else {user}
        return found

    def is_written_for(self, norm: Site) -> bool:
        """Returns whether XLA need not write what a norm is taken of, since its readers can compute it."""
        value = norm.results[1] if "residual" in norm.arrays else norm.arrays["x"].value
        if "residual" in norm.arrays:
            return value not in self._returned and all(user in norm.covered for user in value.users)
        if _is_transposed(norm.arrays["x"]):
            return True
        producer = self._fusible_producer(norm, value)
        readers = set() if producer is None else self._readers(producer.outputs[0])
        return bool(readers) and all(each in norm.covered or self._is_fusible(each) for each in readers)

    def _is_fusible(self, reader: Equation) -> bool:
        owner = self._owners.get(reader)
        return owner.operation in _STREAMING if owner is not None else reader.primitive in _FUSIBLE

    def _takes_in(self, reader: Equation) -> bool:
        """Returns whether XLA may compute what an equation reads in the same launch, if it is elementwise."""
        owner = self._owners.get(reader)
        return owner.operation in _STREAMING if owner is not None else reader.primitive not in _APART


def _bytes(site: Site) -> int:
    """Returns the bytes of a site's arrays and results."""
    arrays = (*structs_of(site).values(), *site.results)
    return sum(math.prod(each.shape) * each.dtype.itemsize for each in arrays)


def _adds_two(equation: Equation | None) -> bool:
    """Returns whether an equation is the sum of two arrays of its result's shape."""
    if equation is None or equation.primitive != "add":
        return False
    return all(each.shape == equation.outputs[0].shape for each in equation.inputs)


def _is_activated(site: Site) -> bool:
    """Returns whether a site is a product with an activation."""
    return site.operation == "linear" and "activation" in site.options


def _narrows(reader: Equation) -> bool:
    """Returns whether an equation casts to fewer bits."""
    is_cast = reader.primitive == "convert_element_type"
    return is_cast and reader.outputs[0].dtype.itemsize < reader.inputs[0].dtype.itemsize


def _is_transposed(binding: Binding) -> bool:
    """Returns whether an argument is an array with its axes in another order."""
    return is_permuted(binding.order) or "transpose" in _layouts(binding.value)


def _is_sliced(binding: Binding) -> bool:
    """Returns whether an argument is a part of a larger array."""
    return not has_all(binding) or not {"slice", "split"}.isdisjoint(_layouts(binding.value))


def _layouts(value: Value) -> Iterator[str]:
    """Yields the layouts that lead to a value, the last first."""
    while value.primitive in LAYOUTS and value.equation is not None:
        yield value.primitive
        value = value.equation.inputs[0]
