"""Reads attributes of instructions: dimension numbers, slices, padding, windows and library configurations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hlo_analysis.hlo.module import Instruction, Module

_INTEGER = re.compile(r"-?\d+")
_STATED_KERNEL = re.compile(r'\bkernel="(\w+)"')
_STATED_FLOPS = re.compile(r'matrix_flops="(\w+) (\d+) / (\d+)"')
PYTHON_TARGETS = ("xla_ffi_python_", "xla_ffi_partitioned_python_")
"""How the targets of custom calls begin that call back to Python on the host."""
_ALIASED_PARAMETER = re.compile(r":\s*\((\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class DotDimensions:
    """Dimension numbers of a matrix product."""

    lhs_batch: tuple[int, ...]
    lhs_contracting: tuple[int, ...]
    rhs_contracting: tuple[int, ...]


def integers(instruction: Instruction, name: str) -> tuple[int, ...]:
    """Returns the integers of an attribute such as `dimensions={0,2}`; () if the attribute is missing."""
    return tuple(int(number) for number in _INTEGER.findall(instruction.attributes.get(name, "")))


def custom_call_target(instruction: Instruction) -> str:
    """Returns the target of a custom call, '' for anything else."""
    return instruction.attributes.get("custom_call_target", "").strip('"')


def stated_flops(instruction: Instruction) -> tuple[str, int, int] | None:
    """Returns the element type, FLOPs and element count that a program states for a kernel.

    The program states them as `matrix_flops="bf16 FLOPS / ELEMENTS"`.
    """
    stated = _STATED_FLOPS.search(instruction.attributes.get("frontend_attributes", ""))
    return (stated[1], int(stated[2]), int(stated[3])) if stated else None


def stated_kernel(instruction: Instruction) -> str:
    """Returns the name that the capture states for a kernel, or ''."""
    stated = _STATED_KERNEL.search(instruction.attributes.get("frontend_attributes", ""))
    return stated[1] if stated else ""


def gemm_config(instruction: Instruction) -> dict[str, Any]:
    """Returns cuBLAS's configuration of a matrix product, empty for anything else."""
    return instruction.backend_config.get("gemm_backend_config") or {}


def fusion_config(fusion: Instruction) -> dict[str, Any]:
    """Returns the configuration of a fusion's code generator, empty for XLA's own emitters and anything else."""
    return fusion.backend_config.get("fusion_backend_config") or {}


def triton_config(fusion: Instruction) -> dict[str, Any]:
    """Returns the tiles and stages of a Triton fusion, empty where XLA states none."""
    return fusion_config(fusion).get("block_level_fusion_config") or {}


def product_precision(instruction: Instruction) -> tuple[bool, str]:
    """Returns whether a product must be exact in float32, and its algorithm such as `dot_tf32_tf32_f32_x3`, or ''."""
    stated = gemm_config(instruction).get("precision_config", {})
    algorithm = instruction.attributes.get("algorithm", "") or str(stated.get("algorithm", ""))
    algorithm = algorithm.lower().removeprefix("alg_")
    precision = f"{instruction.attributes.get('operand_precision', '')} {stated.get('operand_precision', '')}".lower()
    return "highest" in precision or algorithm == "dot_f32_f32_f32", algorithm


def dot_dimensions(instruction: Instruction) -> DotDimensions | None:
    """Returns the dimension numbers of a dot or of a cuBLAS call; None for anything else."""
    if instruction.opcode in ("dot", "scaled-dot"):
        return DotDimensions(
            lhs_batch=integers(instruction, "lhs_batch_dims"),
            lhs_contracting=integers(instruction, "lhs_contracting_dims"),
            rhs_contracting=integers(instruction, "rhs_contracting_dims"),
        )
    if config := gemm_config(instruction):
        numbers = config.get("dot_dimension_numbers", {})
        lhs_batch, lhs, rhs = (
            tuple(int(number) for number in numbers.get(key, ()))
            for key in ("lhs_batch_dimensions", "lhs_contracting_dimensions", "rhs_contracting_dimensions")
        )
        return DotDimensions(lhs_batch=lhs_batch, lhs_contracting=lhs, rhs_contracting=rhs)
    return None


def tile_sizes(fusion: Instruction) -> tuple[int, ...]:
    """Returns the sizes of the tiles of the first result of a Triton fusion; () where XLA states none."""
    tiles = triton_config(fusion).get("output_tiles") or [{}]
    return tuple(int(size) for size in tiles[0].get("sizes", ()))


def slice_strides(instruction: Instruction) -> tuple[int, ...]:
    """Returns the stride of each dimension of a slice."""
    ranges = instruction.attributes.get("slice", "").strip("{}").split(",")
    return tuple(int(parts[2]) if len(parts := found.strip(" []").split(":")) > 2 else 1 for found in ranges)


def interior_padding(instruction: Instruction) -> tuple[int, ...]:
    """Returns how many elements a pad inserts between two elements of each dimension."""
    dimensions = instruction.attributes.get("padding", "").split("x")
    return tuple(int(parts[2]) if len(parts := found.split("_")) > 2 else 0 for found in dimensions)


def window(instruction: Instruction) -> dict[str, str]:
    """Returns the fields of a window, such as {'size': '3x3', 'stride': '2x2'}; fields at their default are missing."""
    fields = instruction.attributes.get("window", "").strip("{}").split()
    return {name: value for name, _, value in (found.partition("=") for found in fields)}


def window_size(instruction: Instruction) -> tuple[int, ...]:
    """Returns the size of a window in each dimension."""
    size = window(instruction).get("size", "")
    return tuple(int(part) for part in size.split("x")) if size else ()


def convolution_labels(instruction: Instruction) -> tuple[str, str, str] | None:
    """Returns the labels of a convolution's input, filter and output ('b01f', '01io', 'b01f'); None for others."""
    inputs, arrow, output = instruction.attributes.get("dim_labels", "").partition("->")
    data, underscore, kernel = inputs.partition("_")
    return (data, kernel, output) if arrow and underscore else None


def aliased_parameters(module: Module) -> frozenset[int]:
    """Returns the numbers of the parameters whose buffers hold results of the program."""
    alias = module.attributes.get("input_output_alias", "")
    return frozenset(int(number) for number in _ALIASED_PARAMETER.findall(alias))
