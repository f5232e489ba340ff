"""Reads tokens of HLO text.

The token classes are those of XLA's own lexer (`xla/hlo/parser/hlo_lexer.cc`): names, `/* */` and `//` comments,
strings in either quote, and brackets. The parser asks for the token that the grammar allows next. One compiled pattern
can therefore read `%name = f32[8]{0} opcode(` in one step. All repetitions in the patterns are possessive, so no text
makes them backtrack, and reading takes linear time.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import cached_property

from hlo_analysis.errors import HloParseError

SPACE = r"(?:[ \t\r\n\f\v]++|/\*(?:[^*]++|\*(?!/))*+\*/|//[^\r\n]*+)*+"
NAME = r"[A-Za-z_][A-Za-z0-9_.\-]*+"
STRING = r"""(?:"(?:[^"\\]++|\\.)*+"|'(?:[^'\\]++|\\.)*+')"""

_FLAGS = re.ASCII | re.DOTALL
_SPACE = re.compile(SPACE, _FLAGS)
_STRING = re.compile(STRING, _FLAGS)
_UNBRACKETED = re.compile(rf"""(?:[^{{}}()\[\]"'/]++|{STRING}|/\*(?:[^*]++|\*(?!/))*+\*/|/(?!\*))*+""", _FLAGS)
_ATOM = re.compile(r"""[^\s,{}()\[\]"']++""", _FLAGS)
_SPACE_BEFORE_BRACKET = re.compile(r"[ \t]++(?=[\[({])")
_WORD = re.compile(r"\S{1,24}")
_NAME_IN_LIST = re.compile(rf"{SPACE}%?({NAME})", _FLAGS)
_CLOSER = {"{": "}", "(": ")", "[": "]"}


def token(pattern: str) -> re.Pattern[str]:
    """Compiles a token's pattern, which skips leading white space and comments."""
    return re.compile(SPACE + pattern, _FLAGS)


class SourceText:
    """A text with its line numbers, shared by everything parsed from it."""

    def __init__(self, text: str):
        self.text = text

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0, *(match.end() for match in re.finditer("\n", self.text))]

    def position(self, offset: int) -> tuple[int, int]:
        """Returns the line and column of an offset, both counted from 1."""
        line = bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1


class Lexer:
    """A cursor over HLO text."""

    def __init__(self, text: str):
        self.source = SourceText(text)
        self.text = text
        self.position = 0

    def error(self, message: str, at: int | None = None) -> HloParseError:
        """Returns the error to raise for offset `at`, or for the next token."""
        line, column = self.source.position(self._after_space() if at is None else at)
        return HloParseError(message, line=line, column=column)

    def unexpected(self, expected: str) -> HloParseError:
        """Returns the error to raise if the next token is not the expected one."""
        word = _WORD.match(self.text, self._after_space())
        return self.error(f"expected {expected}, found {word.group()!r}" if word else f"expected {expected}, text ends")

    def accept(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Reads the token if it is next."""
        match = pattern.match(self.text, self.position)
        if match:
            self.position = match.end()
        return match

    def expect(self, pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        """Reads the token, or raises HloParseError."""
        match = pattern.match(self.text, self.position)
        if not match:
            raise self.unexpected(expected)
        self.position = match.end()
        return match

    def at_end(self) -> bool:
        """Whether only white space and comments are left."""
        self.position = self._after_space()
        return self.position == len(self.text)

    def read_group(self) -> str:
        """Reads a bracket and its content up to the matching bracket, ignoring brackets in strings and comments.

        It does not recurse, because text may nest to any depth.
        """
        text, start = self.text, self.position
        closers: list[str] = []
        position = start
        while True:
            char = text[position : position + 1]
            if char in _CLOSER:
                closers.append(_CLOSER[char])
            elif char and closers and char == closers[-1]:
                closers.pop()
                if not closers:
                    break
            else:
                self.position = position
                if char in ('"', "'"):
                    raise self.error("string without an end", position)
                if char == "/":
                    raise self.error("comment without an end", position)
                raise self.unexpected(repr(closers[-1]) if closers else "a bracket")
            match = _UNBRACKETED.match(text, position + 1)
            assert match is not None  # the pattern matches the empty string
            position = match.end()
        self.position = position + 1
        return text[start : self.position]

    def read_value(self) -> str:
        """Reads the raw text of an attribute's value: adjacent words, strings and groups."""
        text, start = self.text, self.position
        while True:
            position = self.position
            if text[position : position + 1] in _CLOSER:
                self.read_group()
            elif match := _ATOM.match(text, position) or _STRING.match(text, position):
                self.position = match.end()
            elif position > start and (match := _SPACE_BEFORE_BRACKET.match(text, position)):
                self.position = match.end()  # `mesh['x'=2] {'x'}` is one value
            else:
                break
        if self.position == start:
            raise self.unexpected("a value")
        return text[start : self.position]

    def _after_space(self) -> int:
        match = _SPACE.match(self.text, self.position)
        assert match is not None  # the pattern matches the empty string
        return match.end()


def names_in(value: str) -> tuple[str, ...]:
    """Returns the names in `%a` or `{%a, /*index=1*/%b}`, without '%'."""
    names: list[str] = []
    position = 1 if value.startswith("{") else 0
    while match := _NAME_IN_LIST.match(value, position):
        names.append(match.group(1))
        position = match.end()
        separator = value.find(",", position)
        if separator < 0:
            break
        position = separator + 1
    return tuple(names)


_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_ESCAPED = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}


def unquote(literal: str) -> str:
    r"""Returns the string of a quoted literal. XLA writes C escapes, and non-ASCII text as octal UTF-8 (`\303\251`)."""
    body = literal[1:-1]
    if "\\" not in body:
        return body

    def replace(match: re.Match[bytes]) -> bytes:
        octal, hexadecimal, char = match.groups()
        if char is not None:
            return _ESCAPED.get(char, char)
        return bytes([(int(octal, 8) if octal else int(hexadecimal, 16)) & 0xFF])

    return _ESCAPE.sub(replace, body.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")
