"""Where instructions come from: op names, and source frames in both dialects of XLA's metadata.

Since JAX 0.9 an instruction carries `stack_frame_id`, which leads through four tables at the head of the module. Older
text carries `source_file` and `source_line` in the instruction itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hlo_analysis.hlo.lexer import NAME, STRING, Lexer, token, unquote


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFrame:
    """One frame of the Python stack. Lines count from 1; 0 where unknown."""

    file: str
    line: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Metadata:
    """Metadata of one instruction."""

    op_name: str = ""
    """JAX's path to the operation, e.g. 'jit(f)/jvp(block)/mlp/dot_general'; see `hlo_analysis.hlo.scope`."""
    frames: tuple[SourceFrame, ...] = ()
    """Innermost first; empty where the text has none."""


@dataclass(frozen=True, kw_only=True)
class SourceTable:
    """The module's tables of files, functions, locations and stack frames, resolved."""

    frames: dict[int, tuple[SourceFrame, int]] = field(default_factory=dict)
    """Frame id to the frame and the id of its caller, 0 for the outermost."""
    _stacks: dict[int, tuple[SourceFrame, ...]] = field(default_factory=dict, repr=False, compare=False)

    def stack(self, frame_id: int) -> tuple[SourceFrame, ...]:
        """The frames from `frame_id` outwards; () for an id that the table lacks."""
        stack = self._stacks.get(frame_id)
        if stack is None:
            frames: list[SourceFrame] = []
            seen: set[int] = set()
            current = frame_id
            while current in self.frames and current not in seen:
                seen.add(current)
                frame, current = self.frames[current]
                frames.append(frame)
            stack = self._stacks[frame_id] = tuple(frames)
        return stack


_ID = token(r"(\d{1,9}+)\b")
_STRING = token(f"({STRING})")
_OPEN = token(r"\{")
_CLOSE = token(r"\}")
_FIELD = token(rf",?[ \t]*+({NAME})=")
# A field whose value is one word or one string, which most are.
_SIMPLE_FIELD = token(rf",?[ \t]*+({NAME})=({STRING}|[^\s,{{}}()\[\]\"']++)(?=[\s,}}])")
_TITLES = {name: token(rf"{name}\b") for name in ("FileNames", "FunctionNames", "FileLocations", "StackFrames")}


def read_source_table(lexer: Lexer) -> SourceTable:
    """Read the four tables at the head of a module, or none."""
    if not lexer.accept(_TITLES["FileNames"]):
        return SourceTable()
    files = _read_names(lexer)
    lexer.expect(_TITLES["FunctionNames"], "the table FunctionNames")
    _read_names(lexer)
    lexer.expect(_TITLES["FileLocations"], "the table FileLocations")
    locations: dict[int, SourceFrame] = {}
    for key, row, at in _read_rows(lexer):
        numbers = _numbers(lexer, row, at)
        locations[key] = SourceFrame(file=files.get(numbers.get("file_name_id", 0), ""), line=numbers.get("line", 0))
    lexer.expect(_TITLES["StackFrames"], "the table StackFrames")
    frames: dict[int, tuple[SourceFrame, int]] = {}
    for key, row, at in _read_rows(lexer):
        numbers = _numbers(lexer, row, at)
        location = locations.get(numbers.get("file_location_id", 0))
        if location is None:
            raise lexer.error(f"stack frame {key} names a file_location_id that FileLocations does not have", at)
        # XLA prints the caller's id plus one (HloModule::PrintStackFrameIndex), so that 1 stands for no caller.
        caller = numbers.get("parent_frame_id", 1) - 1
        if caller == key:
            raise lexer.error(f"stack frame {key} is its own caller", at)
        frames[key] = (location, caller)
    return SourceTable(frames=frames)


def read_metadata(lexer: Lexer, table: SourceTable) -> Metadata:
    """Read `{op_name="..." stack_frame_id=4}`."""
    start = lexer.position
    fields = read_fields(lexer)
    frames: tuple[SourceFrame, ...] = ()
    if "stack_frame_id" in fields:
        frames = table.stack(_number(lexer, fields, "stack_frame_id", start))
    if not frames and "source_file" in fields:
        frames = (SourceFrame(file=fields["source_file"], line=_number(lexer, fields, "source_line", start)),)
    return Metadata(op_name=fields.get("op_name", ""), frames=frames)


def read_fields(lexer: Lexer) -> dict[str, str]:
    """Read `{name=value name=value}`, with or without commas; strings lose their quotes."""
    lexer.expect(_OPEN, "'{'")
    fields: dict[str, str] = {}
    while True:
        if match := lexer.accept(_SIMPLE_FIELD):
            name, value = match.groups()
        elif match := lexer.accept(_FIELD):
            name, value = match[1], lexer.read_value()
        else:
            break
        fields[name] = unquote(value) if value[0] in "\"'" else value
    lexer.expect(_CLOSE, "'name=' or '}'")
    return fields


def _read_names(lexer: Lexer) -> dict[int, str]:
    names: dict[int, str] = {}
    while match := lexer.accept(_ID):
        names[int(match[1])] = unquote(lexer.expect(_STRING, "a string")[1])
    return names


def _read_rows(lexer: Lexer):
    while match := lexer.accept(_ID):
        yield int(match[1]), read_fields(lexer), match.start(1)


def _numbers(lexer: Lexer, fields: dict[str, str], at: int) -> dict[str, int]:
    return {name: _number(lexer, fields, name, at) for name in fields}


def _number(lexer: Lexer, fields: dict[str, str], name: str, at: int) -> int:
    value = fields.get(name, "0")
    if len(value) > 18 or not (value.isascii() and value.removeprefix("-").isdigit()):
        raise lexer.error(f"expected a number for {name}, found {value[:40]!r}", at)
    return int(value)
