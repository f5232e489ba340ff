"""Reads protobuf's text format without a schema, as far as XLA's target configs and dumps need it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from hlo_analysis.errors import DumpError

# A fusion dump may have eighteen megabytes. Text between tokens is therefore part of the next token's match.
_TOKEN = re.compile(
    r"""(?:\s+|\#[^\n]*)*
      (?:(?P<string>"[^"\\\n]*(?:\\.[^"\\\n]*)*"|'[^'\\\n]*(?:\\.[^'\\\n]*)*')
      | (?P<word>[A-Za-z_][\w.]*|[-+]?(?:\.?\d(?:[\w.]|(?<=[eE])[-+])*|inf|nan))
      | (?P<mark>[{}<>\[\]:;,])
      | (?P<end>\Z))""",
    re.VERBOSE,
)

_ESCAPE = re.compile(rb"\\([0-7]{1,3}|x[0-9a-fA-F]{1,2}|.)", re.DOTALL)
_UNUSUAL = re.compile(r"\\[^abfnrtv\\'\"0-3]|\\[0-3](?![0-7]{2})")
_NAMED = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}


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


class _MalformedError(Exception):
    def __init__(self, message: str, position: int) -> None:
        super().__init__(message)
        self.position = position


def parse_textproto(text: str) -> Message:
    """Parses text format.

    Raises:
        DumpError: the text is not well formed; the message has the line number.
    """
    try:
        return Message(_message(_tokens(text), None))
    except _MalformedError as error:
        line = text.count("\n", 0, error.position) + 1
        raise DumpError(f"text proto, line {line}: {error}") from None


def _tokens(text: str) -> Iterator[_Token]:
    """Yields the kind, text and position of each token; the last marks the end."""
    position, kind, match = 0, "", _TOKEN.match
    while kind != "end":
        found = match(text, position)
        if found is None:
            position += len(text[position:]) - len(text[position:].lstrip())
            raise _MalformedError(f"unexpected {text[position]!r}", position)
        kind, position = found.lastgroup or "", found.end()
        yield kind, found[kind], position


_Token = tuple[str, str, int]
_Fields = tuple[tuple[str, "str | Message"], ...]


def _message(tokens: Iterator[_Token], closer: str | None) -> _Fields:
    """Reads fields up to `closer`, or to the end of the text."""
    fields: list[tuple[str, str | Message]] = []
    pending: _Token | None = None
    while True:
        kind, token, position = pending or next(tokens)
        pending = None
        if token == closer and kind == "mark":
            return tuple(fields)
        if kind == "end":
            if closer is None:
                return tuple(fields)
            raise _MalformedError(f"the text ends inside a message, {closer!r} expected", position)
        if kind == "mark" and token in ";,":
            continue
        if kind == "mark" and token in "}>" and closer is None:
            raise _MalformedError("a closing bracket that nothing opened", position)
        if kind != "word":
            raise _MalformedError(f"a field name expected, found {token!r}", position)
        name = token
        kind, token, position = next(tokens)
        if token == ":" and kind == "mark":
            kind, token, position = next(tokens)
        if kind == "mark" and token in "{<":
            fields.append((name, Message(_message(tokens, "}" if token == "{" else ">"))))
        elif kind == "mark" and token == "[":
            fields.extend((name, value) for value in _list(tokens))
        elif kind == "string":
            value = ""
            while kind == "string":  # adjacent literals form one string
                value += _unquote(token)
                kind, token, position = next(tokens)
            fields.append((name, Quoted(value)))
            pending = (kind, token, position)
        elif kind == "word":
            fields.append((name, token))
        else:
            raise _MalformedError(f"a value for {name!r} expected, found {token or 'the end'!r}", position)


def _list(tokens: Iterator[_Token]) -> Iterator[str | Message]:
    while True:
        kind, token, position = next(tokens)
        if kind == "mark" and token == "]":
            return
        if kind == "mark" and token == ",":
            continue
        if kind == "mark" and token in "{<":
            yield Message(_message(tokens, "}" if token == "{" else ">"))
        elif kind in ("string", "word"):
            yield _unquote(token) if kind == "string" else token
        else:
            raise _MalformedError(f"a list item expected, found {token or 'the end'!r}", position)


def _unquote(literal: str) -> Quoted:
    """Returns a string literal's text. Escapes stand for bytes, and the bytes for UTF-8, as in protobuf."""

    def replace(match: re.Match[bytes]) -> bytes:
        escape = match.group(1)
        if escape[:1] in b"01234567":
            return bytes([int(escape, 8) & 255])
        if escape[:1] == b"x" and len(escape) > 1:
            return bytes([int(escape[1:], 16)])
        return _NAMED.get(escape, escape)

    if "\\" not in literal:
        return Quoted(literal[1:-1])
    if literal.isascii() and not _UNUSUAL.search(literal):  # as Python's, which reads megabytes at once
        return Quoted(ast.literal_eval(f"b{literal}").decode("utf-8", "surrogateescape"))
    data = _ESCAPE.sub(replace, literal[1:-1].encode("utf-8", "surrogateescape"))
    return Quoted(data.decode("utf-8", "surrogateescape"))


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
