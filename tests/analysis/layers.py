# ruff: noqa: E501 (lines of HLO)
"""A module of many equal layers as text, which needs no compiler: what XLA makes of a norm and a gated product."""

from __future__ import annotations

from pathlib import Path

_HEAD = """\
HloModule jit_layers, is_scheduled=true, entry_computation_layout={{(bf16[512,256]{{1,0}})->bf16[512,256]{{1,0}}}}

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}
"""

_COMPUTATIONS = """
%fused_norm.{n} (p.{n}: bf16[512,256]) -> bf16[512,256] {{
  %p.{n} = bf16[512,256]{{1,0}} parameter(0)
  %wide.{n} = f32[512,256]{{1,0}} convert(%p.{n}), metadata={{op_name="jit(layers)/layer_{n}/norm/convert"}}
  %square.{n} = f32[512,256]{{1,0}} multiply(%wide.{n}, %wide.{n}), metadata={{op_name="jit(layers)/layer_{n}/norm/mul"}}
  %zero.{n} = f32[] constant(0)
  %total.{n} = f32[512]{{0}} reduce(%square.{n}, %zero.{n}), dimensions={{1}}, to_apply=%add, metadata={{op_name="jit(layers)/layer_{n}/norm/sum"}}
  %inverse.{n} = f32[512]{{0}} rsqrt(%total.{n}), metadata={{op_name="jit(layers)/layer_{n}/norm/rsqrt"}}
  %spread.{n} = f32[512,256]{{1,0}} broadcast(%inverse.{n}), dimensions={{0}}
  %scaled.{n} = f32[512,256]{{1,0}} multiply(%wide.{n}, %spread.{n}), metadata={{op_name="jit(layers)/layer_{n}/norm/mul"}}
  ROOT %narrow.{n} = bf16[512,256]{{1,0}} convert(%scaled.{n}), metadata={{op_name="jit(layers)/layer_{n}/norm/convert"}}
}}

%fused_gate.{n} (g.{n}: bf16[512,512], u.{n}: bf16[512,512]) -> bf16[512,512] {{
  %g.{n} = bf16[512,512]{{1,0}} parameter(0)
  %u.{n} = bf16[512,512]{{1,0}} parameter(1)
  %act.{n} = bf16[512,512]{{1,0}} logistic(%g.{n}), metadata={{op_name="jit(layers)/layer_{n}/mlp/logistic"}}
  %silu.{n} = bf16[512,512]{{1,0}} multiply(%g.{n}, %act.{n}), metadata={{op_name="jit(layers)/layer_{n}/mlp/mul"}}
  ROOT %gated.{n} = bf16[512,512]{{1,0}} multiply(%silu.{n}, %u.{n}), metadata={{op_name="jit(layers)/layer_{n}/mlp/mul"}}
}}

%fused_residual.{n} (r.{n}: bf16[512,256], d.{n}: bf16[512,256]) -> bf16[512,256] {{
  %r.{n} = bf16[512,256]{{1,0}} parameter(0)
  %d.{n} = bf16[512,256]{{1,0}} parameter(1)
  ROOT %next.{n} = bf16[512,256]{{1,0}} add(%r.{n}, %d.{n}), metadata={{op_name="jit(layers)/layer_{n}/residual/add"}}
}}
"""

_LAYER = """\
  %norm.{n} = bf16[512,256]{{1,0}} fusion({x}), kind=kInput, calls=%fused_norm.{n}, metadata={{op_name="jit(layers)/layer_{n}/norm/mul"}}
  %gate.{n} = bf16[512,512]{{1,0}} dot(%norm.{n}, %wg.{n}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, metadata={{op_name="jit(layers)/layer_{n}/mlp/dot_general"}}
  %up.{n} = bf16[512,512]{{1,0}} dot(%norm.{n}, %wu.{n}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, metadata={{op_name="jit(layers)/layer_{n}/mlp/dot_general"}}
  %gating.{n} = bf16[512,512]{{1,0}} fusion(%gate.{n}, %up.{n}), kind=kLoop, calls=%fused_gate.{n}, metadata={{op_name="jit(layers)/layer_{n}/mlp/mul"}}
  %down.{n} = bf16[512,256]{{1,0}} dot(%gating.{n}, %wd.{n}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, metadata={{op_name="jit(layers)/layer_{n}/mlp/dot_general"}}
  {root}%residual.{n} = bf16[512,256]{{1,0}} fusion({x}, %down.{n}), kind=kLoop, calls=%fused_residual.{n}, metadata={{op_name="jit(layers)/layer_{n}/residual/add"}}
"""

_WEIGHTS = """\
  %wg.{n} = bf16[256,512]{{1,0}} parameter({first})
  %wu.{n} = bf16[256,512]{{1,0}} parameter({second})
  %wd.{n} = bf16[512,256]{{1,0}} parameter({third})
"""

LAUNCHES = 6
"""Of one layer."""


def write_layers(folder: Path, layers: int) -> Path:
    """Writes a dump folder of so many layers, each with weights of its own, and gives its path."""
    folder.mkdir()
    parameters = [f"w{which}.{n}: bf16[{size}]" for n in range(layers) for which, size in _SIZES.items()]
    body = ["  %x = bf16[512,256]{1,0} parameter(0)\n"]
    body += [_WEIGHTS.format(n=n, first=3 * n + 1, second=3 * n + 2, third=3 * n + 3) for n in range(layers)]
    for n in range(layers):
        source = f"%residual.{n - 1}" if n else "%x"
        body.append(_LAYER.format(n=n, x=source, root="ROOT " if n == layers - 1 else ""))
    text = _HEAD.format() + "".join(_COMPUTATIONS.format(n=n) for n in range(layers))
    text += f"\nENTRY %main (x: bf16[512,256], {', '.join(parameters)}) -> bf16[512,256] {{\n{''.join(body)}}}\n"
    (folder / "module_0001.jit_layers.sm_9.0a_gpu_after_optimizations.txt").write_text(text)
    return folder


_SIZES = {"g": "256,512", "u": "256,512", "d": "512,256"}
