"""Reads protobuf's text format without a schema, as XLA writes its target configs and dumps."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hlo_analysis.errors import DumpError
from hlo_analysis.hlo.lexer import unquote

_STRING = r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
# A field with its scalar, the start or end of a message, or what separates them.
_PART = re.compile(
    rf"(?P<name>[A-Za-z_]\w*)\s*(?::\s*(?P<scalar>{_STRING}|[-+\w.]+)|:?\s*(?P<open>\{{))|(?P<close>\}})|\s+|\#[^\n]*"
)


class Quoted(str):
    """A scalar written in quotes, with quotes and escapes removed."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Message:
    """Fields in text order. A value is a `Message` or a scalar's text; a quoted scalar is a `Quoted`."""

    fields: tuple[tuple[str, str | Message], ...]

    def all(self, name: str) -> tuple[str | Message, ...]:
        """Returns all values of a repeated field."""
        return tuple(value for key, value in self.fields if key == name)

    def messages(self, name: str) -> tuple[Message, ...]:
        """Returns all sub-messages of a repeated field."""
        return tuple(value for value in self.all(name) if isinstance(value, Message))

    def message(self, name: str) -> Message:
        """Returns the last sub-message of that name, or an empty one."""
        found = self.messages(name)
        return found[-1] if found else Message(())

    def scalar(self, name: str, default: str = "") -> str:
        """Returns the last scalar of that name."""
        found = [value for value in self.all(name) if isinstance(value, str)]
        return found[-1] if found else default


def parse_textproto(text: str) -> Message:
    """Parses text format.

    Raises:
        DumpError: the text is not well formed; the message has the line number.
    """
    open_: list[tuple[str, list[tuple[str, str | Message]]]] = [("", [])]
    position = 0
    while position < len(text):
        found = _PART.match(text, position)
        if found is None or (found["close"] and len(open_) == 1):
            wanted = "'name: value' or 'name {'" + (" or '}'" if len(open_) > 1 else "")
            raise DumpError(f"{_line(text, position)}: expected {wanted}, got {text[position : position + 40]!r}")
        position = found.end()
        if found["open"]:
            open_.append((found["name"], []))
        elif found["close"]:
            name, fields = open_.pop()
            open_[-1][1].append((name, Message(tuple(fields))))
        elif value := found["scalar"]:
            open_[-1][1].append((found["name"], Quoted(unquote(value)) if value.startswith('"') else value))
    if len(open_) > 1:
        raise DumpError(f"{_line(text, position)}: the text ends inside {open_[-1][0]}, '}}' expected")
    return Message(tuple(open_[0][1]))


def _line(text: str, position: int) -> str:
    return f"text proto, line {text.count(chr(10), 0, position) + 1}"


def format_textproto(message: Message, depth: int = 0) -> str:
    """Formats a message as text, in its own order of fields, indented by two spaces for each level."""
    indent = "  " * depth
    lines: list[str] = []
    for name, value in message.fields:
        if isinstance(value, Message):
            lines += [f"{indent}{name} {{", *filter(None, [format_textproto(value, depth + 1)]), f"{indent}}}"]
        else:
            lines.append(f"{indent}{name}: {_quote(value) if isinstance(value, Quoted) else value}")
    return "\n".join(lines)


def _quote(text: str) -> str:
    def escape(byte: int) -> str:
        character = chr(byte)
        if character in '"\\':
            return "\\" + character
        return character if " " <= character <= "~" else f"\\{byte:03o}"

    return '"' + "".join(map(escape, text.encode("utf-8", "surrogateescape"))) + '"'
