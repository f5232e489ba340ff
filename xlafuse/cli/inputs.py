"""Parses command-line options into a program and its arguments."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from hlo_analysis.errors import nearest_names
from xlafuse.cli.errors import InputError

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


def block_shape(texts: Sequence[str]) -> tuple[int, int]:
    """Parses batch and length of a block's input: '2x4096', the default, gives (2, 4096)."""
    if not texts:
        return 2, 4096
    parts = texts[0].lower().replace("×", "x").split("x")
    if len(texts) > 1 or len(parts) != 2 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"expected one shape BATCHxLENGTH for a block, as 2x4096, got {' '.join(texts)!r}")
    return int(parts[0]), int(parts[1])


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


def load_function(name: str) -> Callable[..., Any]:
    """Loads the function that 'package.module:function' or 'file.py:function' names.

    The current folder is searched first, as with `python -m`.
    """
    found = load_attribute(name, "--fn")
    if not callable(found):
        raise InputError(f"expected a function from --fn {name}, got a {type(found).__name__}")
    return found


def load_arguments(name: str) -> tuple[Any, ...]:
    """Loads the arguments that 'package.module:factory' returns, or the tuple or list of that name."""
    found = load_attribute(name, "--args")
    if callable(found):
        try:
            found = found()
        except (Exception, SystemExit) as error:
            raise InputError(f"--args {name}: calling it failed: {_first_line(error)}") from error
    if not isinstance(found, tuple | list):
        raise InputError(f"expected a tuple of arguments from --args {name}, got a {type(found).__name__}")
    return tuple(found)


def load_attribute(name: str, option: str) -> Any:
    """Loads what 'module:attribute' names; dots after the colon select nested attributes."""
    module_name, colon, path = name.partition(":")
    if not colon or not module_name or not path:
        raise InputError(f"expected {option} package.module:name or file.py:name, got {name!r}")
    value: Any = _load_module(module_name, option)
    where = value.__name__
    for part in path.split("."):
        if not hasattr(value, part):
            known = [each for each in dir(value) if not each.startswith("_")]
            raise InputError(f"{option} {name}: no {part!r} in {where}{nearest_names(part, known)}")
        value, where = getattr(value, part), part
    return value


def function_arguments(
    fn: Callable[..., Any], shapes: Sequence[str], arguments: tuple[Any, ...] | None
) -> tuple[Any, ...]:
    """Returns the arguments to trace `fn` with, from --shape or --args, checked against its signature."""
    import jax
    import jax.numpy as jnp

    if shapes and arguments is not None:
        raise InputError("expected --shape or --args, got both")
    if arguments is None:
        parsed = [argument_shape(text) for text in shapes]
        for text, (_, dtype) in zip(shapes, parsed, strict=True):
            if (narrow := jax.dtypes.canonicalize_dtype(dtype)) != jnp.dtype(dtype):
                raise InputError(f"--shape {text!r}: JAX makes {narrow} of it unless JAX_ENABLE_X64=1 is set")
        arguments = tuple(jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype)) for sizes, dtype in parsed)
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a builtin has no signature
        return arguments
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise InputError(
            f"{getattr(fn, '__name__', 'the function')}{signature} cannot be called with {len(arguments)} arguments: "
            f"{error}. {_how_to_give(signature)}"
        ) from None
    return arguments


def _how_to_give(signature: inspect.Signature) -> str:
    needed = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
    ]
    if needed:
        return f"Name a function that gives {', '.join(needed)} by keyword, as functools.partial makes one."
    return "Give one --shape 'bf16[8192,4096]' for each argument, or --args MODULE:FACTORY."


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
        raise InputError(f"{option}: importing {name} failed: {_first_line(error)}") from error
    except (Exception, SystemExit) as error:  # SystemExit: a script that runs when it is imported
        raise InputError(f"{option}: importing {name} failed: {_first_line(error)}") from error


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
        raise InputError(f"{option}: running {path} failed: {_first_line(error)}") from error
    return module


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
