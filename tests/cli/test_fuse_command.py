"""`xlafuse fuse`: the sites of a file's functions with their calls, the refusals, and what bad input gets."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

MODEL = """\
import jax
import jax.numpy as jnp
from flax import nnx


def rms(h, weight):
    wide = h.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)
    return (wide * inverse * weight).astype(h.dtype)


def block(x, residual, params):
    total = x + residual
    wide = total.astype(jnp.float32)
    variance = jnp.mean(wide**2, axis=-1, keepdims=True)
    print("traced")

    normed = (wide * jax.lax.rsqrt(variance + 1e-6) * params["scale"]).astype(x.dtype)
    y = jax.nn.softmax(
        normed.astype(jnp.float32)
    )
    return 2 * rms(y, 1 + params["scale"]), total


def block_arguments():
    array = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16)
    return array, array, {"scale": jax.ShapeDtypeStruct((256,), jnp.float32)}


def near(x, scale):
    wide = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return x * inverse.astype(x.dtype) * scale


@jax.jit
def softmax(x):
    return jax.nn.softmax(x)


def twice(x):
    a = jax.nn.softmax(x)
    b = 2 * jax.nn.softmax(a)
    c = softmax(b)
    return softmax(c)


def scanned(x, weights):
    return jax.lax.scan(lambda h, w: (rms(h, w), None), x, weights)[0]


def multiplied(x, power):
    return x**power


gradient = jax.grad(lambda x: rms(x, 1.0).sum())
number = 3


def broken(x, w):
    y = x * 2
    return y @ w


def products(x, w):
    for _ in range(2):
        x = x @ w
    return x


def products_of_norm(x, scale, w, positions):
    return rms(x, scale) @ w + positions


class Layer(nnx.Module):
    def __init__(self):
        self.norm = nnx.RMSNorm(256, rngs=nnx.Rngs(0))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.dropout(self.norm(x))


layer = Layer()


def apply(layer, x):
    return layer(layer(x))


def layer_arguments():
    return layer, jnp.ones((8, 256))
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # --fn puts the current folder on it
    monkeypatch.delitem(sys.modules, "fused_model", raising=False)
    (tmp_path / "fused_model.py").write_text(MODEL)
    monkeypatch.setattr("xlafuse.cli.fuse.worse_in", lambda *own: ())  # compiles


@pytest.fixture
def fused(invoke):
    """What `xlafuse fuse --json` gives of a function of the file."""

    def found(name: str, *words: str):
        result = invoke("fuse", "--fn", f"fused_model.py:{name}", "--json", *words)
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)

    return found


ROWS, SCALE = ("--shape", "bf16[8,256]"), ("--shape", "f32[256]")
MANY_ROWS = ("--shape", "bf16[1024,256]")
ALL = ("--ops", "rms_norm,softmax")
"""Takes sites also where XLA fuses them with their neighbours."""


def test_the_sites_and_their_calls(invoke, tmp_path: Path):
    result = invoke("fuse", "--fn", "fused_model.py:block", "--args", "fused_model.py:block_arguments", *ALL)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "traced",
        "block: 3 sites taken, 0 refused",
        "+ fused_model.py:18: rms_norm(x=bfloat16[8,256], scale=float32[256], residual=bfloat16[8,256], epsilon=1e-06)"
        " for 12 equations; mosaic",
        "+ fused_model.py:9: rms_norm(x=float32[8,256], scale=float32[256], epsilon=1e-05) for 9 equations; mosaic",
        "+ fused_model.py:19: softmax(x=float32[8,256]) for 9 equations; mosaic",
    ]
    assert (tmp_path / "fused_model.py").read_text() == MODEL


def test_json_has_the_same(fused):
    found = fused("block", "--args", "fused_model.py:block_arguments", *ALL)
    assert (found["function"], found["notes"], found["refused"], found["worse"]) == ("block", [], [], [])
    site = found["taken"][0]
    assert site.pop("options").items() >= {"epsilon": 1e-06}.items()
    assert site.pop("where").endswith("fused_model.py:18")
    assert site == {
        "operation": "rms_norm",
        "arrays": {"x": "bfloat16[8,256]", "scale": "float32[256]", "residual": "bfloat16[8,256]"},
        "implementation": "mosaic",
        "equations": 12,
        "note": "",
        "parts": "",
    }


def test_target_and_operations(fused):
    found = fused("block", "--args", "fused_model.py:block_arguments", "--target", "cpu", "--ops", "softmax")
    assert [(each["operation"], each["implementation"]) for each in found["taken"]] == [("softmax", "xla")]


def test_refusals_with_line_and_difference(invoke, fused):
    result = invoke("fuse", "--fn", "fused_model.py:near", *ROWS, "--shape", "bf16[256]")
    assert "near: 0 sites taken, 1 refused" in result.stdout
    assert "fused_model.py:33: no rms_norm: " in result.stdout and "in bfloat16" in result.stdout
    assert [
        each["operation"] for each in fused("near", *MANY_ROWS, "--shape", "bf16[256]", "--allow", "rounding")["taken"]
    ] == ["rms_norm"]


def test_what_is_left_to_xla_is_counted_apart(invoke, fused):
    rows = ("--shape", "bf16[8,256]", "--shape", "bf16[256,256]")
    found = fused("products", *rows)
    assert found["taken"] == []
    assert [(each["operation"], each["where"]) for each in found["left"]] == [("linear", "fused_model.py:67")] * 2
    printed = invoke("fuse", "--fn", "fused_model.py:products", *rows).stdout
    assert printed.startswith("products: 0 sites taken, 2 left to XLA, 0 refused\n")
    assert re.search(r"\n= fused_model.py:67: linear left to XLA: .*, 2 times\n$", printed)


def test_jitted_helpers_that_are_called_twice(fused):
    found = fused("twice", "--shape", "f32[8,256]", *ALL)
    assert sorted((each["operation"], each["options"].get("scale", 1.0)) for each in found["taken"]) == [
        ("softmax", 1.0),
        ("softmax", 1.0),
        ("softmax", 1.0),
        ("softmax", 2.0),
    ]


def test_bodies_of_loops(fused):
    found = fused("scanned", *MANY_ROWS, "--shape", "f32[3,256]")
    assert found["taken"][0]["where"] == "fused_model.py:9"


def test_library_code_gets_the_call_and_its_place(invoke, fused):
    words = ("apply", "--args", "fused_model.py:layer_arguments", *ALL)
    found = fused(*words)
    assert [each["operation"] for each in found["taken"]] == ["rms_norm"] * 2
    (where,) = {each["where"] for each in found["taken"]}
    printed = invoke("fuse", "--fn", "fused_model.py:apply", *words[1:]).stdout
    assert f"+ {where}: rms_norm(x=float32[8,256], scale=float32[256], epsilon=1e-06) for " in printed
    assert "; mosaic, 2 times\n" in printed


def test_a_mesh_of_the_programs_own(fused, tmp_path: Path):
    with (tmp_path / "fused_model.py").open("a") as file:
        file.write(
            "from jax.sharding import AbstractMesh, PartitionSpec as P\n"
            "mesh = AbstractMesh((4,), ('data',), axis_types=(jax.sharding.AxisType.Auto,))\n"
            "spread = jax.shard_map(rms, mesh=mesh, in_specs=(P('data'), P()), out_specs=P('data'))\n"
        )
    (site,) = fused("spread", "--shape", "bf16[32,256]", *SCALE)["taken"]
    assert site["arrays"]["x"] == "bfloat16[8,256]"


def test_differentiated_functions_are_told(fused, invoke):
    found = fused("gradient", "--shape", "f32[8,256]")
    assert found["taken"] == found["refused"] == []
    assert "is differentiated already" in found["notes"][0]
    assert (
        "is differentiated already" in invoke("fuse", "--fn", "fused_model.py:gradient", "--shape", "f32[8,256]").stdout
    )


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("number", [], "expected a function from --fn fused_model.py:number, got int"),
        ("blok", [], "no 'blok' in fused_model; did you mean 'block'"),
        ("near", [*ROWS], "Give one --shape "),
        ("near", [*ROWS, *SCALE, "--ops", "rms"], "fuse: no operation 'rms'; ops are among"),
        ("near", [*ROWS, *SCALE, "--allow", "all"], "fuse: unknown allowance 'all'; there are 'rounding'"),
        ("near", [*ROWS, *SCALE, "--target", "h2000"], "h2000"),
        ("near", [*ROWS, "--shape", "f32[256"], "expected --shape as"),
        ("layer", ["--shape", "f32[8,256]"], "have --args return the module, and --fn take it as an argument"),
    ],
)
def test_bad_input(invoke, name, words, message):
    result = invoke("fuse", "--fn", f"fused_model.py:{name}", *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout in ("", "traced\n")


def test_an_error_of_the_function_comes_with_its_line(invoke):
    result = invoke("fuse", "--fn", "fused_model.py:broken", "--shape", "f32[8,256]", "--shape", "f32[8]")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "xlafuse: broken could not be traced with arguments (x: f32[8,256], w: f32[8]): TypeError: dot_general requires"
    )
    assert result.stderr.endswith("\n  at fused_model.py:62, in broken: return y @ w\n")
    assert "Traceback" not in result.stderr


def test_static_arguments(fused, tmp_path: Path):
    (tmp_path / "given.py").write_text("import jax.numpy as jnp\narguments = (jnp.ones((8, 256)), 2)\n")
    assert fused("multiplied", "--args", "given.py:arguments")["taken"] == []


def test_the_page_shows_what_the_command_prints(invoke, tmp_path: Path):
    root = Path(__file__).parents[2]
    blocks = {
        name: re.findall(rf"```{name}\n(.*?)```", text, re.DOTALL)
        for name, text in (
            ("python", (root / "README.md").read_text(encoding="utf-8")),
            ("text", (root / "docs/drop-ins.md").read_text(encoding="utf-8")),
        )
    }
    (tmp_path / "readme_model.py").write_text(blocks["python"][0])
    rows = ("--shape", "bf16[8192,4096]")
    result = invoke("fuse", "--fn", "readme_model.py:add_norm", *rows, *rows, "--shape", "bf16[4096]")
    assert result.stdout.replace("readme_model", "model").split() == blocks["text"][0].split()
