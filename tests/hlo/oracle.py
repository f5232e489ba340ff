"""jaxlib's own parser as an oracle for ours."""

from __future__ import annotations

import re

from jaxlib import _hlo

from hlo_analysis.hlo import Module

_ENTRY = re.compile(r"^ENTRY %([\w.\-]+)", re.MULTILINE)


def assert_agrees(module: Module, text: str) -> int:
    """Assert that `module`, parsed from `text`, is what jaxlib parses; returns the number of instructions compared."""
    oracle = _hlo.hlo_module_from_text(text)
    assert module.name == oracle.name
    printed = oracle.to_string()
    theirs = {computation.name: computation for computation in oracle.computations()}
    entry = _ENTRY.search(printed)
    assert entry is not None and entry[1] == module.entry_name
    # Text abbreviates an async pair around one instruction; jaxlib makes the computation in between again.
    extra = set(theirs) - set(module.computations)
    assert all(f"%{name} " not in text and f"\n{name} " not in text for name in extra), extra
    assert set(module.computations) <= set(theirs)
    compared = 0
    for name, computation in module.computations.items():
        instructions = theirs[name].instructions()
        ours = list(computation.instructions.values())
        assert len(ours) == len(instructions), name
        position = {instruction.name: index for index, instruction in enumerate(ours)}
        their_position = {instruction.name: index for index, instruction in enumerate(instructions)}
        for our, their in zip(ours, instructions, strict=True):
            if "#" in our.name:  # an abbreviated get-tuple-element, which jaxlib names a_0, or a_0.1 if that is taken
                assert their.name.startswith(our.name.replace("#", "_"))
            else:
                assert our.name == their.name
            assert [position[o] for o in our.operands] == [their_position[o.name] for o in their.operands()], our.text
            users = sorted(their_position[user.name] for user in their.users())
            assert sorted(position[user] for user in computation.users(our.name)) == users, our.text
            line = their.to_string()
            # jaxlib drops the layout `{:E(4)}` of a scalar constant, and abbreviates asynchronous pairs.
            is_scalar = not our.shape.dimensions and not our.shape.is_tuple
            shape = str(our.shape) if our.opcode == "constant" and is_scalar else our.shape.text
            opcode = our.opcode
            if opcode in ("async-start", "async-update", "async-done"):
                opcode = line.removeprefix(f"%{their.name} = {shape} ").partition("(")[0]
                assert opcode.endswith(our.opcode.removeprefix("async")), (line, our)
            assert line.startswith(f"%{their.name} = {shape} {opcode}("), (line, our)
            assert our.is_root == (our.name == computation.root)
            compared += 1
    roots = dict(re.findall(r"^(?:ENTRY )?%([\w.\-]+) .*?^  ROOT %([\w.\-]+) =", printed, re.MULTILINE | re.DOTALL))
    assert module.entry_name in roots
    for name in roots.keys() & module.computations.keys():  # those of asynchronous pairs are not printed
        assert roots[name].startswith(module.computations[name].root.replace("#", "_"))
    return compared
