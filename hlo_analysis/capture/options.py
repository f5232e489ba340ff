"""The names of XLA's compiler options, for error messages that suggest the right one.

XLA offers no list of them, but every shared object of it carries the schema of its DebugOptions message, which is what
`compiler_options` sets. Reading it costs some tenths of a second, so only an error does.
"""

from __future__ import annotations

import functools
import mmap
from importlib.util import find_spec
from pathlib import Path

# A serialized FileDescriptorProto starts with field 1 (the file's name): tag, length 13, "xla/xla.proto".
_START = b"\n\rxla/xla.proto"
_MESSAGE_TYPE = 4
_LENGTH_DELIMITED = 2


@functools.cache
def option_names() -> tuple[str, ...]:
    """Every option of the installed XLA, or () when its schema cannot be found."""
    spec = find_spec("jaxlib")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    for library in (path for folder in folders for path in sorted(folder.glob("libjax_common*"))):
        try:
            with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                names = _debug_options(data)
        except (OSError, ValueError):
            continue
        if names:
            return names
    return ()


def _debug_options(data: mmap.mmap) -> tuple[str, ...]:
    start = data.find(_START)
    while start >= 0:
        for payload in _messages(data, start):
            if payload.startswith(b"\n\x0cDebugOptions"):
                from google.protobuf import descriptor_pb2

                fields = descriptor_pb2.DescriptorProto.FromString(payload).field
                return tuple(sorted(field.name for field in fields))
        start = data.find(_START, start + 1)
    return ()


def _messages(data: mmap.mmap, position: int):
    """The `message_type` fields of the FileDescriptorProto at `position`, up to the first that makes no sense."""
    while position < len(data):
        tag, position = _varint(data, position)
        if tag & 7 != _LENGTH_DELIMITED:
            return
        length, position = _varint(data, position)
        if tag >> 3 == _MESSAGE_TYPE:
            yield data[position : position + length]
        elif tag >> 3 not in (1, 2, 3):  # name, package and dependencies come before the messages
            return
        position += length


def _varint(data: mmap.mmap, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 64:
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, position
    raise ValueError("not a protobuf varint")
