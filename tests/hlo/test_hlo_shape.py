"""Shapes: what they are, how large, and how they print."""

import jax.numpy as jnp
import numpy as np
import pytest

from hlo_analysis.hlo import HloParseError, Layout, parse_shape
from hlo_analysis.hlo.shape import ELEMENT_BITS


def test_an_array():
    shape = parse_shape("bf16[8,4096]{1,0:T(8,128)(2,1)S(3)}")
    assert shape.element_type == "bf16"
    assert shape.dimensions == (8, 4096)
    assert shape.dynamic == (False, False)
    assert shape.layout == Layout(minor_to_major=(1, 0), memory_space=3, text="{1,0:T(8,128)(2,1)S(3)}")
    assert (shape.element_count, shape.byte_size) == (32768, 65536)
    assert str(shape) == "bf16[8,4096]"
    assert shape.text == "bf16[8,4096]{1,0:T(8,128)(2,1)S(3)}"
    assert not shape.is_tuple
    assert not shape.is_token


def test_a_tuple():
    shape = parse_shape("(f32[2]{0}, (s32[], pred[3]{0}), token[])")
    assert shape.is_tuple
    assert [str(element) for element in shape.elements] == ["f32[2]", "(s32[], pred[3])", "token[]"]
    assert shape.elements[2].is_token
    assert (shape.element_count, shape.byte_size) == (6, 8 + 4 + 3)
    assert str(shape) == "(f32[2], (s32[], pred[3]), token[])"
    assert parse_shape("()").elements == ()
    assert parse_shape("()").byte_size == 0


def test_long_tuples_print_as_xla_does():
    text = "(s32[], s32[], s32[], s32[], s32[], /*index=5*/s32[], s32[], s32[], s32[], s32[], /*index=10*/s32[])"
    assert parse_shape(text).text == text
    assert len(parse_shape(text).elements) == 11


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[]", 4),
        ("f64[0,7]", 0),
        ("c128[2]", 32),
        ("s4[3]", 2),
        ("s4[3]{0:E(4)}", 2),
        ("u2[5]", 2),
        ("s1[9]", 2),
        ("f4e2m1fn[8]", 4),
        ("f8e4m3fn[3,3]", 9),
        ("s8[3]{0:E(4)}", 2),
        ("pred[10]", 10),
        ("token[]", 0),
        ("opaque[]", 0),
        ("f32[<=8,4]{1,0}", 128),
        ("b(f32[3]{0})", 12),
    ],
)
def test_sizes(text, size):
    assert parse_shape(text).byte_size == size
    assert parse_shape(text).text == text


def test_dynamic_dimensions():
    shape = parse_shape("f32[<=8,4,?]")
    assert shape.dimensions == (8, 4, -1)
    assert shape.dynamic == (True, False, True)
    assert str(shape) == "f32[<=8,4,?]"
    with pytest.raises(ValueError, match="without a bound"):
        _ = shape.byte_size


def test_every_jax_type_has_its_size():
    names = {"bool": "pred", "complex64": "c64", "complex128": "c128", "bfloat16": "bf16"}
    for name in (
        *("bool_", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e3m4"),
        *("float8_e4m3", "float8_e8m0fnu", "float4_e2m1fn", "bfloat16", "float16", "float32", "float64"),
        *("complex64", "complex128"),
    ):
        dtype = jnp.dtype(getattr(jnp, name))
        text = names.get(dtype.name) or dtype.name.replace("uint", "u").replace("int", "s").replace("float", "f")
        bits = jnp.finfo(dtype).bits if "float" in dtype.name else None
        text = text.replace("_", "")
        assert text in ELEMENT_BITS, text
        if bits:
            assert ELEMENT_BITS[text] == bits
        elif "int4" not in dtype.name:
            assert ELEMENT_BITS[text] == 8 * np.dtype(dtype).itemsize


def test_a_layout_may_hold_a_physical_shape():
    text = "f32[4,4]{1,0:D(D,C)T(2,2)P((s32[4]{0}, f32[4]{0:T(8)}))}"
    shape = parse_shape(text)
    assert shape.layout is not None
    assert shape.layout.minor_to_major == (1, 0)
    assert shape.text == text


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("", 1, "expected a shape, text ends"),
        ("f32", 1, "expected a shape, found 'f32'"),
        ("g32[1]", 1, "unknown element type 'g32'"),
        ("f32[-1]", 1, "expected dimension sizes"),
        ("f32[1", 1, "expected a shape"),
        ("f32[1]{a}", 1, "expected dimension numbers in the layout"),
        ("f32[1]{0:S(x)}", 1, "expected a number in S(...)"),
        ("f32[1]{0", 9, "expected '}', text ends"),
        ("(f32[1]", 8, "expected ',' or ')' in a tuple shape, text ends"),
        ("f32[1] f32[1]", 8, "expected the end of the shape"),
        ("(" * 100, 65, "tuples nested deeper than 64"),
    ],
)
def test_errors(text, column, message):
    with pytest.raises(HloParseError) as caught:
        parse_shape(text)
    assert message in str(caught.value)
    assert (caught.value.line, caught.value.column) == (1, column)
