"""Loads functions by the names that a command line gives, and parses shapes and options."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hlo_analysis.errors import InputError, nearest_names

DTYPES = {
    "bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64",
    "s4": "int4", "s8": "int8", "s16": "int16", "s32": "int32", "s64": "int64",
    "i4": "int4", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u4": "uint4", "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64",
    "f8e4m3fn": "float8_e4m3fn", "f8e5m2": "float8_e5m2", "f8e8m0fnu": "float8_e8m0fnu", "f4e2m1fn": "float4_e2m1fn",
    "c64": "complex64", "c128": "complex128",
    "pred": "bool", "bool": "bool",
}  # fmt: skip
"""HLO's names of element types and JAX's short names, with NumPy's names, which are accepted too."""


def compiler_options(texts: Sequence[str]) -> dict[str, str | bool]:
    """Parses XLA options: 'xla_gpu_enable_triton_gemm=false' gives {'xla_gpu_enable_triton_gemm': False}.

    Numbers stay text, which XLA parses.
    """
    options: dict[str, str | bool] = {}
    for text in texts:
        name, separator, value = text.removeprefix("--").partition("=")
        if not (name and separator):
            raise InputError(f"expected --option NAME=VALUE, as xla_gpu_enable_triton_gemm=false, got {text!r}")
        options[name] = {"true": True, "false": False}.get(value.lower(), value)
    return options


def argument_shape(text: str) -> tuple[tuple[int, ...], str]:
    """Parses shape and dtype: 'bf16[8192,4096]' gives ((8192, 4096), 'bfloat16')."""
    name, bracket, rest = text.strip().partition("[")
    if not bracket or not rest.endswith("]"):
        raise InputError(f"expected --shape as 'bf16[8192,4096]' or 'f32[]' for a function's argument, got {text!r}")
    dtype = DTYPES.get(name, name)
    if dtype not in DTYPES.values():
        raise InputError(
            f"unknown element type {name!r} in {text!r}{nearest_names(name, (*DTYPES, *DTYPES.values())) or '.'} "
            f"Known: {', '.join(DTYPES)}"
        )
    sizes = [size.strip() for size in rest[:-1].split(",") if size.strip()]
    if not all(size.isdecimal() for size in sizes):
        raise InputError(f"expected whole numbers in the brackets of --shape {text!r}")
    return tuple(int(size) for size in sizes), dtype


def argument(text: str) -> Any:
    """Parses shape and dtype as `argument_shape` does, to a `jax.ShapeDtypeStruct`."""
    import jax
    import jax.numpy as jnp

    sizes, dtype = argument_shape(text)
    if (narrow := jax.dtypes.canonicalize_dtype(dtype)) != jnp.dtype(dtype):
        raise InputError(f"--shape {text!r}: JAX makes {narrow} of it unless JAX_ENABLE_X64=1 is set")
    return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype))


def load_function(name: str, option: str = "--fn") -> Callable[..., Any]:
    """Loads the function that 'package.module:function' or 'file.py:function' names.

    The current folder is searched first, as with `python -m`.
    """
    found = load_attribute(name, option)
    if not callable(found):
        raise InputError(f"expected a function from {option} {name}, got {type(found).__name__}")
    return found


def load_attribute(name: str, option: str) -> Any:
    """Loads what 'module:attribute' names; dots after the colon select nested attributes."""
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise InputError(f"expected {option} package.module:name or file.py:name, got {name!r}")
    value: Any = _load_module(module_name, option)
    where = value.__name__
    for part in path.split("."):
        try:
            value, where = getattr(value, part), part
        except AttributeError:
            known = [each for each in dir(value) if not each.startswith("_")]
            message = f"{option} {name}: no {part!r} in {where}{nearest_names(part, known)}"
            raise InputError(message) from None
        except Exception as error:  # a property of the user's may raise anything
            raise InputError(f"{option} {name}: {first_line(error)}") from error
    return value


def _load_module(name: str, option: str) -> ModuleType:
    if name.endswith(".py"):
        return _load_file(Path(name), option)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise InputError(f"{option}: no module {error.name!r} here or among the installed packages") from None
        raise InputError(f"{option}: importing {name} failed: {first_line(error)}") from error
    except (Exception, SystemExit) as error:  # SystemExit: a script that runs when it is imported
        raise InputError(f"{option}: importing {name} failed: {first_line(error)}") from error


def _load_file(path: Path, option: str) -> ModuleType:
    """Runs a file once as a module, so that --fn and --args share its classes and globals."""
    if not path.is_file():
        raise InputError(f"{option}: no file {path}")
    file = path.resolve()
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(file):
        return known
    spec = importlib.util.spec_from_file_location(path.stem, file)
    if spec is None or spec.loader is None:
        raise InputError(f"{option}: {path} is not a Python file")
    sys.path.insert(0, str(file.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[path.stem]
        raise InputError(f"{option}: running {path} failed: {first_line(error)}") from error
    return module


def first_line(error: BaseException) -> str:
    """Returns an error's type, the first line of its message, and the line of the user's that raised it."""
    from hlo_analysis.capture.lowering import user_place

    lines = str(error).splitlines() or [""]
    place = user_place(error)
    return f"{type(error).__name__}: {lines[0]}" + (f" ({place})" if place else "")
