"""Parses HLO text by recursive descent.

    module       = [ "HloModule" name attributes ] [ source tables ] computation+
    computation  = [ "ENTRY" ] name [ "(" parameters ")" "->" shape ] "{" instruction+ "}" attributes
    instruction  = [ "ROOT" ] name "=" shape opcode "(" operands | literal ")" attributes
    operands     = [ operand { "," operand } ]
    operand      = [ shape ] name { "#" index }
    attributes   = { "," name "=" value }

The parser accepts the text that XLA prints, as XLA's own parser does (`xla/hlo/parser/hlo_parser.cc`). Names may lack
their '%', and computations their signature. Values of attributes, except metadata, stay raw text with balanced
brackets. The parser checks names as it reads them: every operand is an earlier instruction, and every called
computation exists. XLA abbreviates a get-tuple-element without metadata to `%fusion.43#1` where it is used. The parser
enters an instruction of that name, which no other instruction can have.
"""

from __future__ import annotations

import re
from dataclasses import replace

from hlo_analysis.hlo.lexer import NAME, STRING, Lexer, names_in, token
from hlo_analysis.hlo.module import Computation, Instruction, Module
from hlo_analysis.hlo.shape import Shape, array_shape, read_shape
from hlo_analysis.hlo.source import Metadata, SourceTable, read_metadata, read_source_table

CALL_ATTRIBUTES = frozenset(
    (
        "calls",
        "to_apply",
        "body",
        "condition",
        "branch_computations",
        "true_computation",
        "false_computation",
        "called_computations",
        "select",
        "scatter",
    )
)
"""Attributes whose value names computations."""

_MODULE = token(r"HloModule\b")
_NAME = token(rf"%?({NAME})")
_ENTRY = token(r"ENTRY\b")
_OPEN = token(r"\{")
_CLOSE = token(r"\}")
_PARENTHESIS = token(r"(?=\()")
_ARROW = token(r"->")
_COMMA = token(r",")
_END_OF_OPERANDS = token(r"\)")
_OPERAND_NAME = token(rf"%?({NAME})((?:#\d{{1,9}}+)*+)(?=[\s,)/])")
_OPCODE = token(r"([a-z][a-z0-9\-]*+)(?=\()")
# The head of an instruction up to its opcode. For a shape that is not a plain array (a tuple), groups 4 to 7 are empty.
_HEAD = token(
    rf"()(ROOT[ \t]++)?%?({NAME})[ \t]*+=[ \t]*+"
    r"(?:([a-z][a-z0-9]*+)\[([0-9,]*+)\](\{[^{}]*+\}|(?!\{))[ \t]++([a-z][a-z0-9\-]*+)(?=\())?"
)
_PLAIN_OPERANDS = token(r"\(([^()\[\]{}\"'/=]*+)\)")
_ATTRIBUTE = token(rf",[ \t]*+({NAME})=")
# A value that is one word, one string or one group without inner brackets, as most values are.
_VALUE = token(rf"""([A-Za-z0-9_.%\-]++|{STRING}|\{{[^{{}}()\[\]"'/]*+\}})(?=[,\n])""")


def parse_module(text: str) -> Module:
    """Parses the text of an HLO module, in time proportional to its length.

    Args:
        text: the module as XLA dumps it (`xla_dump_hlo_as_text`), as `HloModule.to_string` prints it, or as the
            priority-fusion dump contains it.

    Raises:
        HloParseError: the text is not a well-formed module, or names something that it does not define.
    """
    return _Parser(text).module()


class _Parser:
    def __init__(self, text: str):
        self.lexer = Lexer(text)
        self.shapes: dict[str, Shape] = {}
        self.table = SourceTable()
        self.calls: list[Instruction] = []

    def module(self) -> Module:
        lexer = self.lexer
        name, attributes = "", {}
        if lexer.accept(_MODULE):
            name = lexer.expect(_NAME, "the module's name")[1]
            attributes, _ = self.attributes()
        self.table = read_source_table(lexer)
        computations: dict[str, Computation] = {}
        entry: str | None = None
        while not lexer.at_end():
            at = lexer.position
            computation = self.computation()
            if computation.name in computations:
                raise lexer.error(f"computation {computation.name!r} is defined twice", at)
            computations[computation.name] = computation
            if computation.is_entry:
                if entry is not None:
                    raise lexer.error(f"a second ENTRY computation, after {entry!r}", at)
                entry = computation.name
        if not computations:
            raise lexer.unexpected("a computation")
        for instruction in self.calls:
            for called in instruction.called:
                if called not in computations:
                    raise lexer.error(
                        f"{instruction.name!r} calls {called!r}, which the module does not define", instruction.start
                    )
        # Like XLA: without ENTRY the last computation is the entry.
        entry = entry if entry is not None else next(reversed(computations))
        return Module(
            name=name or f"module_{entry}",
            attributes=attributes,
            computations=computations,
            entry_name=entry,
            source=self.table,
        )

    def computation(self) -> Computation:
        lexer = self.lexer
        start = lexer.position
        is_entry = lexer.accept(_ENTRY) is not None
        name = lexer.expect(_NAME, "a computation")[1]
        if lexer.accept(_PARENTHESIS):
            lexer.read_group()
            lexer.expect(_ARROW, "'->' after the parameters of a computation")
            read_shape(lexer, self.shapes)
        lexer.expect(_OPEN, "'{' before the instructions of a computation")
        instructions: dict[str, Instruction] = {}
        root: str | None = None
        while not lexer.accept(_CLOSE):
            instruction = self.instruction(instructions)
            instructions[instruction.name] = instruction
            if instruction.is_root:
                if root is not None:
                    raise lexer.error(f"a second ROOT, after {root!r}", instruction.start)
                root = instruction.name
        if not instructions:
            raise lexer.error(f"computation {name!r} has no instructions", start)
        if root is None:  # like XLA: the last instruction
            root, last = next(reversed(instructions.items()))
            instructions[root] = replace(last, is_root=True)
        self.attributes()  # such as execution_thread
        return Computation(
            name=name,
            instructions=instructions,
            root=root,
            is_entry=is_entry,
            source=lexer.source,
            start=start,
            end=lexer.position,
        )

    def instruction(self, earlier: dict[str, Instruction]) -> Instruction:
        lexer = self.lexer
        head = _HEAD.match(lexer.text, lexer.position)
        if not head:
            raise lexer.unexpected("an instruction or '}'")
        lexer.position = head.end()
        _, root, name, kind, sizes, layout, opcode = head.groups()
        start = head.start(1)
        if name in earlier:
            raise lexer.error(f"instruction {name!r} is defined twice", head.start(3))
        if kind:
            shape = self.shapes.get(f"{kind}[{sizes}]{layout}") or array_shape(
                lexer, self.shapes, kind, sizes, layout, head.start(4)
            )
        else:
            shape = read_shape(lexer, self.shapes)
            opcode = lexer.expect(_OPCODE, "an opcode and '('")[1]
        literal: str | None = None
        operands: tuple[str, ...] = ()
        if opcode == "constant" or opcode == "parameter":
            literal = self.literal(opcode)
        else:
            operands = self.operands(earlier)
        attributes, metadata = self.attributes()
        called: tuple[str, ...] = ()
        if not CALL_ATTRIBUTES.isdisjoint(attributes):
            called = tuple(n for key, value in attributes.items() if key in CALL_ATTRIBUTES for n in names_in(value))
        instruction = Instruction(
            name=name,
            opcode=opcode,
            shape=shape,
            operands=operands,
            attributes=attributes,
            literal=literal,
            is_root=root is not None,
            metadata=metadata,
            called=called,
            source=lexer.source,
            start=start,
            end=lexer.position,
        )
        if called:
            self.calls.append(instruction)
        return instruction

    def literal(self, opcode: str) -> str:
        lexer = self.lexer
        at = lexer.position
        literal = lexer.read_group()[1:-1].strip()
        if opcode == "parameter" and not (literal.isascii() and literal.isdigit() and len(literal) <= 9):
            raise lexer.error(f"expected the number of the parameter, found {literal[:40]!r}", at + 1)
        return literal

    def operands(self, earlier: dict[str, Instruction]) -> tuple[str, ...]:
        lexer = self.lexer
        plain = _PLAIN_OPERANDS.match(lexer.text, lexer.position)
        if plain:
            inner = plain[1]
            names = [name.strip().removeprefix("%") for name in inner.split(",")] if inner.strip() else []
            if all(name in earlier for name in names):
                lexer.position = plain.end()
                return tuple(names)
        lexer.position += 1
        names = []
        if lexer.accept(_END_OF_OPERANDS):
            return ()
        while True:
            match = lexer.accept(_OPERAND_NAME)
            if not match:
                read_shape(lexer, self.shapes)
                match = lexer.expect(_OPERAND_NAME, "the name of an operand")
            name, elements = match.groups()
            if name not in earlier:
                raise lexer.error(f"operand {name!r} is not an earlier instruction", match.start(1))
            for index in elements.split("#")[1:]:
                name = self.element(earlier, name, index, match)
            names.append(name)
            if not lexer.accept(_COMMA):
                lexer.expect(_END_OF_OPERANDS, "',' or ')' after an operand")
                return tuple(names)

    def element(self, earlier: dict[str, Instruction], name: str, index: str, at: re.Match[str]) -> str:
        """Returns the name of the get-tuple-element that XLA abbreviates to `name#index`, entering it on first use."""
        element = f"{name}#{index}"
        if element not in earlier:
            shape = earlier[name].shape
            if not shape.is_tuple or int(index) >= len(shape.elements):
                raise self.lexer.error(f"{name!r} of shape {str(shape)[:60]} has no element {index}", at.start(1))
            earlier[element] = Instruction(
                name=element,
                opcode="get-tuple-element",
                shape=shape.elements[int(index)],
                operands=(name,),
                attributes={"index": index},
                source=self.lexer.source,
                start=at.start(1) - (self.lexer.text[at.start(1) - 1] == "%"),
                end=at.end(),
            )
        return element

    def attributes(self) -> tuple[dict[str, str], Metadata | None]:
        lexer = self.lexer
        text = lexer.text
        attributes: dict[str, str] = {}
        metadata: Metadata | None = None
        position = lexer.position
        while match := _ATTRIBUTE.match(text, position):
            name = match[1]
            lexer.position = position = match.end()
            if name == "metadata":
                metadata = read_metadata(lexer, self.table)
            elif name in attributes:
                raise lexer.error(f"attribute {name!r} is given twice", match.start(1))
            elif value := _VALUE.match(text, position):
                attributes[name] = value[1]
                lexer.position = value.end()
            else:
                attributes[name] = lexer.read_value()
            position = lexer.position
        return attributes, metadata
