"""Reads XLA:GPU's thunk list: the steps of the executable, as the dump writes them.

`*.thunk_sequence.txt` holds one line per thunk, nested under loops, branches and asynchronous regions:

    003: kWhile [prev=002 (1) | sink        ]
    condition:
        004: kCustomKernel [source | sink] wrapped_add grid: [8, 1, 1] threads: [128, 1, 1]  shared_memory: 0 bytes
      body:
        005: kCopy [source | sink] kCopy

`*.thunk_metadata.txt` (a text proto) maps each thunk id to the HLO instruction that it came from. This module reads
only these two texts, not HLO.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from hlo_analysis.errors import DumpError

CONTAINERS = frozenset(
    {
        "kSequential",
        "kWhile",
        "kConditional",
        "kCommandBuffer",
        "kAsyncStart",
        "kDynamicSliceFusion",
    }
)
"""Thunks that hold other thunks and launch nothing themselves."""

WAITS = frozenset({"kAsyncDone", "kWaitForStreams", "kCopyDone", "kRecvDone", "kSendDone"})
"""Thunks that wait for others and launch nothing."""

_THUNK = re.compile(r"(?P<id>\d+): (?P<kind>k\w+)\s*\[(?:source|prev=)[^\]]*\](?P<rest>.*)")
_KERNEL = re.compile(
    r"\s*(?P<name>\S+) grid: \[(?P<grid>[\d, ]+)\] threads: \[(?P<block>[\d, ]+)\]"
    r"\s+shared_memory: (?P<shared>\d+) bytes"
)
_PAIR = re.compile(r"\basync_id=(\d+)")
_NONE = "No thunks."
"""The whole list of a program that only returns its arguments, or returns nothing."""
_LABEL = re.compile(r"\s*(condition|body|true_branch|false_branch|branch_\d+):\s*$")


@dataclass(frozen=True, kw_only=True)
class Thunk:
    """One step of the executable.

    `region` is '' or the part of the enclosing loop or conditional that contains it: 'condition', 'body', 'branch_0',
    …. `grid` and `block` count thread blocks and threads. `shared_memory_bytes` is the dynamic part alone. `async_id`
    pairs a start with its wait.
    """

    id: int
    kind: str
    region: str = ""
    kernel: str | None = None
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    shared_memory_bytes: int | None = None
    async_id: int | None = None
    children: tuple[Thunk, ...] = ()

    @property
    def launches(self) -> bool:
        """Whether the thunk itself enqueues work on the device."""
        if self.kind in CONTAINERS:
            # A container that XLA printed without its content still launches something.
            return not self.children and self.kind == "kDynamicSliceFusion"
        return self.kind not in WAITS

    def walk(self) -> Iterator[Thunk]:
        """Yields the thunk and all thunks under it, in the order of the dump."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass
class _Open:
    """A thunk whose children are still being read; `indent` is its column."""

    indent: int
    fields: dict
    region: str = ""
    children: list[_Open] = field(default_factory=list)

    def close(self) -> Thunk:
        return Thunk(**self.fields, children=tuple(child.close() for child in self.children))


def _triple(text: str) -> tuple[int, int, int]:
    x, y, z = (int(part) for part in text.split(","))
    return x, y, z


def parse_thunk_sequence(text: str) -> tuple[Thunk, ...]:
    """Reads `*.thunk_sequence.txt` into a forest of thunks, in execution order.

    Raises:
        DumpError: a line is not a thunk, a region label or blank: the file was cut off, or another XLA wrote it.
    """
    root = _Open(indent=-1, fields={})
    stack = [root]

    def add(indent: int, match: re.Match[str]) -> None:
        while stack[-1].indent >= indent:
            stack.pop()
        parent = stack[-1]
        fields: dict = {"id": int(match["id"]), "kind": match["kind"], "region": parent.region}
        if kernel := _KERNEL.match(match["rest"]):
            fields |= {
                "kernel": kernel["name"],
                "grid": _triple(kernel["grid"]),
                "block": _triple(kernel["block"]),
                "shared_memory_bytes": int(kernel["shared"]),
            }
        if pair := _PAIR.search(match["rest"]):
            fields["async_id"] = int(pair[1])
        node = _Open(indent=indent, fields=fields)
        parent.children.append(node)
        stack.append(node)
        # XLA prints the first child of a kSequential on the line of its parent.
        if inline := _THUNK.match(match["rest"].lstrip()):
            add(indent + 2, inline)

    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith(_NONE):  # XLA ends it with no line break: the next label or thunk follows
            line = line.lstrip().removeprefix(_NONE)
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        if match := _THUNK.match(line.lstrip()):
            add(indent, match)
        elif label := _LABEL.match(line):
            # 'condition:' is printed at column 0, right after its kWhile, whatever the depth.
            while label[1] != "condition" and stack[-1].indent >= indent:
                stack.pop()
            if stack[-1] is root:
                raise DumpError(f"thunk sequence, line {number}: region {label[1]!r} stands outside any loop or branch")
            stack[-1].region = label[1]
        else:
            raise DumpError(
                f"thunk sequence, line {number}: expected '<id>: k<Kind> [...]' or a region label, got {line[:80]!r}; "
                "was the file cut off, or written by another version of XLA?"
            )
    return tuple(child.close() for child in root.children)


def parse_thunk_metadata(text: str) -> dict[int, str]:
    """Reads `*.thunk_metadata.txt` into a map from thunk id to the name of the HLO instruction.

    Thunks without an id or a name are left out.
    """
    names: dict[int, str] = {}
    identifier, name = 0, ""
    for line in [*text.splitlines(), "thunk_metadata {"]:
        key, _, value = line.strip().partition(": ")
        if key == "thunk_metadata {":
            if identifier and name:
                names[identifier] = name
            identifier, name = 0, ""
        elif key == "thunk_id" and value.isdigit():
            identifier = int(value)
        elif key == "profile_annotation":
            name = value.strip('"')
    return names
