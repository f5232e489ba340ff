"""The schema-free reader and writer of protobuf's text format."""

from __future__ import annotations

import pytest
from google.protobuf import struct_pb2, text_format
from hypothesis import given
from hypothesis import strategies as st

from hlo_analysis.errors import DumpError
from hlo_analysis.targets.textproto import Message, Quoted, format_textproto, parse_textproto

SAMPLE = r"""
# a comment
name: "NVIDIA \"H200\""
count: -3
rate: 1.5e-3  kind: FULL_NAME  # on one line
inner {
  list: 1
  list: 2
  deeper {
    flag: true
  }
}
inner: {
  list: 4
}
bytes: "\001A\n\303\251"
"""


def test_every_construct() -> None:
    message = parse_textproto(SAMPLE)
    assert message.scalar("name") == 'NVIDIA "H200"'
    assert message.scalar("count") == "-3"
    assert message.scalar("rate") == "1.5e-3"
    assert message.scalar("kind") == "FULL_NAME"
    first, second = message.messages("inner")
    assert first.all("list") == ("1", "2")
    assert first.message("deeper").scalar("flag") == "true"
    assert second.all("list") == ("4",)
    assert message.scalar("bytes") == "\x01A\né"
    assert message.scalar("absent", "7") == "7"
    assert message.message("absent").fields == ()


@pytest.mark.parametrize(
    ("text", "line"),
    [("a {\n b: 1", 2), ("a: 1\n}", 2), ("a:\n", 1), ("\n\n{", 3), ('a: "unfinished', 1), ("a: [1]", 1), ("a: ?", 1)],
)
def test_broken_text_names_its_line(text: str, line: int) -> None:
    with pytest.raises(DumpError, match=f"line {line}\\b"):
        parse_textproto(text)


def test_written_text_reads_back_the_same() -> None:
    message = parse_textproto(SAMPLE)
    assert parse_textproto(format_textproto(message)) == message


@given(st.dictionaries(st.text(min_size=1, max_size=5), st.one_of(st.text(max_size=8), st.booleans()), max_size=4))
def test_agrees_with_protobuf(values: dict[str, str | bool]) -> None:
    proto = struct_pb2.Struct()
    proto.update(values)
    ours = format_textproto(parse_textproto(text_format.MessageToString(proto)))
    assert text_format.Parse(ours, struct_pb2.Struct()) == proto


def test_quoting_survives() -> None:
    message = Message((("a", Quoted("1")), ("b", "1")))
    assert format_textproto(message) == 'a: "1"\nb: 1'
    assert isinstance(parse_textproto('a: "1"').scalar("a"), Quoted)


@given(st.text(alphabet='ab{}<>[]:;,"\\ \n#1.', max_size=40))
def test_any_text_reads_or_raises_dump_error(text: str) -> None:
    try:
        parse_textproto(text)
    except DumpError as error:
        assert "line" in str(error)
