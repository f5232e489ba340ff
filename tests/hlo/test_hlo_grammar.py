"""Constructs that JAX programs rarely print, one by one, with jaxlib as the oracle where it knows them."""

import pytest
from oracle import assert_agrees

from hlo_analysis.hlo import HloParseError, parse_module


def entry(*lines: str, header: str = "", before: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m{header}\n\n{before}ENTRY %main {{\n{body}\n}}\n"


ADD = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %z.1 = f32[] add(%x, %y)
}

"""
NEGATE = """%wrapped (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  ROOT %y = f32[4]{0} negate(%x)
}"""

TEXTS = {
    "typed operands": entry(
        "%p = (f32[2,3]{1,0}, s32[]) parameter(0)",
        "%x = f32[2,3]{1,0} get-tuple-element((f32[2,3]{1,0}, s32[]) %p), index=0",
        "ROOT %y = f32[2,3]{1,0} add(f32[2,3]{1,0} %x, f32[2,3]{1,0} %x)",
    ),
    "names without a sign": """HloModule m

add.1 {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}

ENTRY main.2 {
  p-0 = f32[4]{0} parameter(0)
  zero = f32[] constant(0)
  ROOT sum = f32[] reduce(p-0, zero), dimensions={0}, to_apply=add.1
}
""",
    "root is not the last": entry(
        "%p = f32[] parameter(0)", "ROOT %q = f32[] negate(%p)", '%r = f32[] custom-call(%q), custom_call_target="x"'
    ),
    "no root": entry("%p = f32[] parameter(0)", "%q = f32[] negate(%p)"),
    "no entry": "HloModule m\n\n%main {\n  %p = f32[] parameter(0)\n  ROOT %q = f32[] negate(%p)\n}\n",
    "abbreviated elements": entry(
        "%p = (f32[2]{0}, (f32[3]{0}, s32[])) parameter(0)",
        "%n = f32[2]{0} negate(%p#0)",
        "%m = f32[2]{0} add(%p#0, /*index=1*/%n)",
        "%k = s32[] negate(%p#1#1)",
        "ROOT %t = (f32[2]{0}, s32[]) tuple(%m, %k)",
    ),
    "an element whose name is taken": entry(
        "%p = (f32[2]{0}, s32[]) parameter(0)", "%p_0 = f32[2]{0} parameter(1)", "ROOT %n = f32[2]{0} add(%p#0, %p_0)"
    ),
    "layouts": entry(
        "%a = f32[8,128]{1,0:T(8,128)} parameter(0)",
        "%b = bf16[8,128]{0,1:T(8,128)(2,1)S(1)} parameter(1)",
        "%c = s4[8,128]{1,0:T(8,128)E(4)S(3)} parameter(2)",
        "%d = f32[]{:T(128)} parameter(3)",
        "ROOT %e = (f32[8,128]{1,0:T(8,128)}, bf16[8,128]{0,1:T(8,128)(2,1)S(1)}) tuple(%a, %b)",
    ),
    "dynamic dimensions": entry("%a = f32[<=8,4]{1,0} parameter(0)", "ROOT %b = f32[<=8,4]{1,0} negate(%a)"),
    "unbounded dimensions": entry("%a = f32[?,4]{1,0} parameter(0)", "ROOT %b = f32[?,4]{1,0} negate(%a)"),
    "buffers": entry(
        "%p = f32[4]{0} parameter(0)",
        '%b = b(f32[4]{0}) custom-call(%p), custom_call_target="Pin", output_to_operand_aliasing={{}: (0, {})}',
        'ROOT %q = f32[4]{0} custom-call(%b), custom_call_target="Unpin", output_to_operand_aliasing={{}: (0, {})}',
    ),
    "narrow types": entry(
        "%a = f4e2m1fn[4]{0:E(4)} parameter(0)",
        "%b = f8e8m0fnu[4]{0} parameter(1)",
        "%c = u2[4]{0:E(2)} parameter(2)",
        "%d = f8e3m4[] parameter(3)",
        "ROOT %t = (f4e2m1fn[4]{0:E(4)}, opaque[]) tuple(%a, %o)",
    ).replace("  ROOT", '  %o = opaque[] custom-call(%d), custom_call_target="o"\n  ROOT'),
    "tokens and streams": entry(
        "%t = token[] after-all()",
        '%i = ((f32[3]{0}, pred[]), token[]) infeed(%t), infeed_config="a,b={\\"c\\"}"',
        "%d = (f32[3]{0}, pred[]) get-tuple-element(%i), index=0",
        "%o = token[] outfeed(%d, %t), outfeed_shape=(f32[3]{0}, pred[])",
        "%s = (f32[3]{0}, u32[], token[]) send(%d#0, %o), channel_id=2, is_host_transfer=true",
        "ROOT %e = token[] send-done(%s), channel_id=2, is_host_transfer=true",
    ),
    "constants": entry(
        "%a = f32[] constant(-inf)",
        "%b = f32[2,2]{1,0} constant({ { 1, -2.5 }, { nan, 1e-30 } })",
        "%c = pred[3]{0} constant({1, 0, 1})",
        "%d = c64[2]{0} constant({(1, 2), (0, -1)})",
        "%e = (f32[], s32[2]{0}) constant((1, {2, 3}))",
        "%f = f32[0]{0} constant({})",
        "%g = f32[1000,1000]{1,0} constant({...})",
        "%h = s8[2,2]{1,0} constant({ /*i0=0*/ { 1, 2 }, /*i0=1*/ { 3, 4 } })",
        "%i = f32[] constant(nan(0x400001))",
        "%j = pred[] constant(true)",
        "ROOT %k = f32[] add(%a, %i)",
    ),
    "backend_config": entry(
        "%p = f32[] parameter(0)",
        'ROOT %q = f32[] custom-call(%p), custom_call_target="a{\\"b\\n", '
        'backend_config={"k":"}{\\"","l":[{"m":1.5},{}],"n":null}',
    ),
    "backend_config as a string": entry(
        "%p = f32[] parameter(0)",
        'ROOT %q = f32[] custom-call(%p), custom_call_target="t", api_version=API_VERSION_TYPED_FFI, '
        "operand_layout_constraints={f32[]}, custom_call_has_side_effect=true, "
        'backend_config="{a = 1 : i32, b = \\"\\\\\\"\\"}"',
    ),
    "called computations": entry(
        "%p = f32[] parameter(0)",
        'ROOT %q = f32[] custom-call(%p), custom_call_target="t", called_computations={%add, %add}',
        before=ADD,
    ),
    "sharding, origin, statistics, control": entry(
        '%p = f32[4]{0} parameter(0), parameter_replication={true}, sharding={devices=[2]<=[2] metadata={op_name="x"}}'
        ', origin={{"p"}}',
        "%q = f32[4]{0} negate(%p), sharding={replicated}, statistics={visualizing_index=0, a-stat=3.5}",
        '%r = f32[4]{0} exponential(%p), control-predecessors={%p, %q}, frontend_attributes={a="b",c={"d":1}}',
        "ROOT %s = f32[4]{0} add(%q, %r), sharding={maximal device=0}",
    ),
    "collectives": entry(
        "%p = f32[4]{0} parameter(0)",
        "%a = f32[4]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true, "
        "to_apply=%add",
        "%b = f32[8]{0} all-gather(%a), channel_id=2, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}, "
        "use_global_device_ids=true",
        "ROOT %c = f32[8]{0} collective-permute(%b), channel_id=3, source_target_pairs={{0,1},{1,0}}",
        before=ADD,
        header=", num_partitions=4",
    ),
    "asynchronous, abbreviated": entry(
        "%p = f32[4]{0} parameter(0)",
        "%s = ((f32[4]{0}), f32[4]{0}, u32[]) negate-start(%p)",
        "%u = ((f32[4]{0}), f32[4]{0}, u32[]) negate-update(%s)",
        "ROOT %d = f32[4]{0} negate-done(%u)",
    ),
    "asynchronous, in full": entry(
        "%p = f32[4]{0} parameter(0)",
        "%s = ((f32[4]{0}), f32[4]{0}, u32[]) async-start(%p), calls=%wrapped",
        "ROOT %d = f32[4]{0} async-done(%s)",
        before=NEGATE + "\n\n",
    ),
    "threads": entry(
        "%p = f32[4]{0} parameter(0)",
        '%s = ((f32[4]{0}), f32[4]{0}, u32[]) async-start(%p), async_execution_thread="other", calls=%wrapped',
        "ROOT %d = f32[4]{0} async-done(%s)",
        before=NEGATE + ', execution_thread="other"\n\n',
    ),
    "windows and slices": entry(
        "%p = f32[1,8,8,2]{3,2,1,0} parameter(0)",
        "%k = f32[3,3,2,4]{3,2,1,0} parameter(1)",
        "%c = f32[1,4,8,4]{3,2,1,0} convolution(%p, %k), window={size=3x3 stride=2x1 pad=1_1x1_1 rhs_reversal=1x0}, "
        "dim_labels=b01f_01io->b01f, operand_precision={highest,default}",
        "%s = f32[1,2,2,1]{3,2,1,0} slice(%c), slice={[0:1], [0:4:2], [1:3], [0:1]}",
        "ROOT %d = f32[2,4,2,1]{3,2,1,0} pad(%s, %z), padding=0_1x1_1x0_0x0_0_2",
    ).replace("  ROOT", "  %z = f32[] constant(0)\n  ROOT"),
    "select and scatter, sort, compare": entry(
        "%p = f32[4]{0} parameter(0)",
        "%z = f32[] constant(0)",
        "%s = f32[4]{0} sort(%p), dimensions={0}, is_stable=true, to_apply=%less",
        "%w = f32[2]{0} parameter(1)",
        "ROOT %g = f32[4]{0} select-and-scatter(%s, %w, %z), window={size=2 stride=2}, select=%less, scatter=%add",
        before=ADD + "%less (l: f32[], r: f32[]) -> pred[] {\n  %l = f32[] parameter(0)\n  %r = f32[] parameter(1)\n"
        "  ROOT %lt = pred[] compare(%l, %r), direction=LT, type=TOTALORDER\n}\n\n",
    ),
    "aliases and donors": entry(
        "%p = f32[4]{0} parameter(0)",
        "%q = f32[4]{0} parameter(1)",
        "%n = f32[4]{0} negate(%p)",
        "ROOT %t = (f32[4]{0}) tuple(%n)",
        header=", input_output_alias={ {0}: (0, {}, must-alias) }, buffer_donor={ (1, {}) }, replica_count=2, "
        'frontend_attributes={a="b",c="{\\"d\\"}"}',
    ),
    "comments": entry(
        "// a line",
        "%p = f32[4]{0} /* here */ parameter(0) // and there }",
        "ROOT %t = (f32[4]{0}, f32[4]{0}) tuple(%p, /*index=1*/ %p)",
    ),
    "old metadata": entry(
        "%p = f32[4]{0} parameter(0)",
        'ROOT %q = f32[4]{0} negate(%p), metadata={op_type="neg" op_name="jit(f)/block/neg" source_file="a \\"b\\".py" '
        "source_line=12 source_end_line=13 source_column=2 source_end_column=9}",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_agrees_with_jaxlib(name):
    text = TEXTS[name]
    assert assert_agrees(parse_module(text), text) >= 1


def instruction(name: str, text: str):
    return parse_module(TEXTS[text]).entry.instructions[name]


def test_attributes_are_kept_as_written():
    assert instruction("b", "collectives").attributes == {
        "channel_id": "2",
        "replica_groups": "[2,2]<=[2,2]T(1,0)",
        "dimensions": "{0}",
        "use_global_device_ids": "true",
    }
    assert instruction("c", "windows and slices").attributes["window"] == (
        "{size=3x3 stride=2x1 pad=1_1x1_1 rhs_reversal=1x0}"
    )
    assert instruction("s", "windows and slices").attributes == {"slice": "{[0:1], [0:4:2], [1:3], [0:1]}"}
    assert instruction("c", "windows and slices").attributes["dim_labels"] == "b01f_01io->b01f"
    assert instruction("p", "sharding, origin, statistics, control").attributes["sharding"] == (
        '{devices=[2]<=[2] metadata={op_name="x"}}'
    )


def test_replica_groups_of_a_mesh_are_one_value():
    text = entry(
        "%p = f32[4]{0} parameter(0)",
        "ROOT %a = f32[4]{0} all-reduce(%p), replica_groups=mesh['x'=2,'y'=2] {'x'}, to_apply=%add",
        before=ADD,
    )
    attributes = parse_module(text).entry.root_instruction.attributes
    assert attributes == {"replica_groups": "mesh['x'=2,'y'=2] {'x'}", "to_apply": "%add"}


def test_header_attributes():
    module = parse_module(TEXTS["aliases and donors"])
    assert module.attributes == {
        "input_output_alias": "{ {0}: (0, {}, must-alias) }",
        "buffer_donor": "{ (1, {}) }",
        "replica_count": "2",
        "frontend_attributes": '{a="b",c="{\\"d\\"}"}',
    }
    scheduled = parse_module(entry("%p = f32[] parameter(0)", header=", is_scheduled=true"))
    assert scheduled.attributes["is_scheduled"] == "true"


def test_called_computations():
    assert instruction("q", "called computations").called == ("add", "add")
    assert instruction("g", "select and scatter, sort, compare").called == ("less", "add")
    assert instruction("s", "asynchronous, in full").called == ("wrapped",)
    assert instruction("sum", "names without a sign").called == ("add.1",)
    branches = entry(
        "%i = s32[] parameter(0)",
        "%p = f32[] parameter(1)",
        "ROOT %c = f32[] conditional(%i, %p, %p), branch_computations={%neg, /*index=1*/%neg}",
        before="%neg (a: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n  ROOT %b = f32[] negate(%a)\n}\n\n",
    )
    assert parse_module(branches).entry.root_instruction.called == ("neg", "neg")


def test_backend_config():
    assert instruction("q", "backend_config").backend_config == {"k": '}{"', "l": [{"m": 1.5}, {}], "n": None}
    assert instruction("q", "backend_config as a string").backend_config == {}
    assert instruction("p", "backend_config").backend_config == {}
    quoted = entry("%p = f32[] parameter(0)", 'ROOT %q = f32[] negate(%p), backend_config="{\\"a\\": 1}"')
    assert parse_module(quoted).entry.root_instruction.backend_config == {"a": 1}
    plain = entry("%p = f32[] parameter(0)", 'ROOT %q = f32[] negate(%p), backend_config="128"')
    assert parse_module(plain).entry.root_instruction.backend_config == {}


def test_literals():
    module = parse_module(TEXTS["constants"])
    literals = {name: i.literal for name, i in module.entry.instructions.items()}
    assert literals["b"] == "{ { 1, -2.5 }, { nan, 1e-30 } }"
    assert literals["e"] == "(1, {2, 3})"
    assert literals["g"] == "{...}"
    assert literals["i"] == "nan(0x400001)"
    assert literals["k"] is None
    assert [p.literal for p in parse_module(TEXTS["aliases and donors"]).entry.parameters] == ["0", "1"]


def test_elements_are_instructions():
    computation = parse_module(TEXTS["abbreviated elements"]).entry
    assert list(computation.instructions) == ["p", "p#0", "n", "m", "p#1", "p#1#1", "k", "t"]
    element = computation.instructions["p#1#1"]
    assert (element.opcode, str(element.shape), element.operands) == ("get-tuple-element", "s32[]", ("p#1",))
    assert element.attributes == {"index": "1"}
    assert element.text == "%p#1#1"
    assert computation.users("p#0") == ("n", "m")
    assert computation.users("p") == ("p#0", "p#1")
    assert computation.users("t") == ()
    with pytest.raises(KeyError):
        computation.users("nothing")


def test_parameters_come_by_number():
    text = entry("%b = f32[2]{0} parameter(1)", "%a = f32[1]{0} parameter(0)", "ROOT %t = (f32[1]{0}) tuple(%a)")
    assert [p.name for p in parse_module(text).entry.parameters] == ["a", "b"]


def test_entry_root_and_threads():
    assert parse_module(TEXTS["no entry"]).entry.name == "main"
    assert parse_module(TEXTS["no root"]).entry.root == "q"
    assert parse_module(TEXTS["root is not the last"]).entry.root == "q"
    threads = parse_module(TEXTS["threads"])
    assert [c.is_entry for c in threads.computations.values()] == [False, True]


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        ("", 1, 1, "expected a computation, text ends"),
        ("HloModule", 1, 10, "expected the module's name"),
        ("HloModule m", 1, 12, "expected a computation"),
        ("HloModule m\n\nENTRY main {\n}", 3, 1, "'main' has no instructions"),
        (entry("%p = f32[] parameter(x)"), 4, 24, "expected the number of the parameter, found 'x'"),
        (entry("%p = f33[] parameter(0)"), 4, 8, "unknown element type 'f33'"),
        (entry("%p = f32[2,] parameter(0)"), 4, 8, "expected dimension sizes"),
        (entry("%p = f32[] parameter(0)", "%p = f32[] parameter(1)"), 5, 4, "'p' is defined twice"),
        (entry("%q = f32[] negate(%p)"), 4, 22, "operand 'p' is not an earlier instruction"),
        (entry("%p = f32[] parameter(0)", "%q = f32[] negate(%p#0)"), 5, 22, "'p' of shape f32[] has no element 0"),
        (entry("%p = f32[] parameter(0)", "%q = f32[] fusion(%p), calls=%f"), 5, 3, "calls 'f', which the module does"),
        (entry("%p = f32[] parameter(0), a=1, a=2"), 4, 33, "attribute 'a' is given twice"),
        (entry("%p = f32[] parameter(0), a="), 5, 1, "expected a value"),
        (entry('%p = f32[] parameter(0), a={"b'), 4, 31, "string without an end"),
        (entry("%p = f32[] parameter(0), a={(}"), 4, 32, "expected ')', found '}'"),
        (entry("ROOT %p = f32[] parameter(0)", "ROOT %q = f32[] parameter(1)"), 5, 3, "a second ROOT, after 'p'"),
        (2 * entry("%p = f32[] parameter(0)").removeprefix("HloModule m\n\n"), 4, 1, "'main' is defined twice"),
        (entry("%p = f32[] parameter(0)").removesuffix("}\n"), 5, 1, "expected an instruction or '}', text ends"),
        (entry("%p = f32[] parameter(0), metadata={op_name=}"), 4, 46, "expected a value"),
        (entry('%p = f32[] parameter(0), metadata={source_file="a" source_line=b}'), 4, 37, "a number for source_line"),
    ],
)
def test_errors_say_where_and_what(text, line, column, message):
    with pytest.raises(HloParseError) as caught:
        parse_module(text)
    assert message in str(caught.value)
    assert (caught.value.line, caught.value.column) == (line, column)
