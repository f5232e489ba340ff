"""Launch tables made by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hlo_analysis import missed
from hlo_analysis.catalogue import PATTERNS, Kernel
from hlo_analysis.hlo import parse_module
from hlo_analysis.missed import rank
from hlo_analysis.program.facts import LaunchFacts, LaunchRow
from hlo_analysis.records import Decision, Device, Intermediate, MissedFusion, Value
from hlo_analysis.remedies import Remedy

MIB = 2**20
DEVICE = Device(
    name="d",
    description="1 MiB a microsecond, 2 µs a launch",
    memory_bandwidth=MIB * 1e6,
    matrix_flops=(("bf16", 1e15),),
    vector_flops=1e14,
    launch_overhead_us=2.0,
    source="",
)


def facts_of(body: str, **passed: str) -> LaunchFacts:
    """Facts of a launch from the instructions of its body, as HLO text.

    A name that the body does not define is a value outside the launch. passed: for a parameter of the body the value
    outside that the fusion passes.
    """
    defined = set(re.findall(r"%([\w.\-]+) = ", body))
    outside = dict.fromkeys(name for name in re.findall(r"%([\w.\-]+)", body) if name not in defined)
    outside.pop("add", None)
    first = len(re.findall(r" parameter\(", body))
    parameters = "".join(f"%{name} = f32[] parameter({first + number})\n" for number, name in enumerate(outside))
    sums = "%add (a: f32[], b: f32[]) -> f32[] { a = f32[] parameter(0) b = f32[] parameter(1) c = f32[] add(a, b) }"
    module = parse_module(f"HloModule m\n\n{sums}\n\nbody {{\n{parameters}{body}\n}}")
    instructions = {name: found for name, found in module.entry.instructions.items() if name not in outside}
    return LaunchFacts(instructions=instructions, launched=module.entry.root_instruction, parameters=passed)


def softmax(scores: str) -> dict[str, Any]:
    """Opcodes and instructions of a launch that makes a softmax of the rows of `scores`."""
    hlo = """%s = f32[8,8] parameter(0)
    %m = f32[8] reduce(%s, %lowest), dimensions={1}, to_apply=%add
    %rows = f32[8,8] broadcast(%m), dimensions={0}
    %d = f32[8,8] subtract(%s, %rows)
    %e = f32[8,8] exponential(%d)
    %sum = f32[8] reduce(%e, %zero), dimensions={1}, to_apply=%add
    %sums = f32[8,8] broadcast(%sum), dimensions={0}
    ROOT %p = f32[8,8] divide(%e, %sums)"""
    return {"opcodes": ("exponential", "reduce", "divide"), "hlo": hlo, "passed": {"s": scores}}


CATALOGUE = [Kernel(name=name, pattern=name, package="kernels", compute_capabilities=(9,)) for name in PATTERNS]


def text_of(remedy: Remedy) -> str:
    """What a missed fusion says where this is its remedy."""
    return remedy.named(CATALOGUE, ()).text


class Program:
    """Builds launches and the values between them; sizes are in MiB."""

    def __init__(self) -> None:
        self.launches: list[LaunchRow] = []
        self.values: dict[str, tuple[int, int]] = {}
        self.readers: dict[str, list[int]] = {}
        self.decisions: list[Decision] = []

    def launch(
        self,
        name: str,
        reads: dict[str, int],
        writes: int,
        kind: Any = "loop",
        *,
        hlo: str = "",
        passed: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Program:
        """Adds a launch. hlo and passed: see `facts_of`."""
        index = len(self.launches)
        inputs = tuple(
            Value(name=value, shape=f"f32[{size}]", bytes=size * MIB, producer=self.values.get(value, (None,))[0])
            for value, size in reads.items()
        )
        for value in reads:
            self.readers.setdefault(value, []).append(index)
        self.values[name] = (index, writes)
        repeat = fields.get("repeat", 1)
        total = sum(reads.values()) + writes
        self.launches.append(
            LaunchRow(
                index=index,
                thunk_id=index,
                name=name,
                kind=kind,
                computation=fields.pop("computation", "main"),
                op_name=fields.pop("op_name", f"jit(f)/{name}"),
                inputs=inputs,
                outputs=(Value(name=name, shape=fields.pop("shape", f"f32[{writes}]"), bytes=writes * MIB),),
                bytes_read=sum(reads.values()) * MIB,
                bytes_written=writes * MIB,
                roofline_us=fields.pop("roofline_us", total + 2.0),
                opcodes=tuple((opcode, 1) for opcode in fields.pop("opcodes", ("add",))),
                facts=facts_of(hlo, **(passed or {})) if hlo else LaunchFacts(),
                **fields,
            )
        )
        assert repeat >= 1
        return self

    def decide(self, producer: int, consumer: int, category: str, reason: str = "because") -> Program:
        self.decisions.append(
            Decision(
                producer=self.launches[producer].name,
                consumer=self.launches[consumer].name,
                verdict="ineligible",
                reason=reason,
                category=category,
                pass_name="priority-fusion",
                producer_launch=producer,
                consumer_launch=consumer,
            )
        )
        return self

    def rank(self, shapes: Mapping[str, str] | None = None, **options: Any) -> tuple[MissedFusion, ...]:
        """The missed fusions; `shapes` are those of values that are to have another than their size."""
        between = []
        for name, (index, size) in self.values.items():
            readers = self.readers.get(name, [])
            repeats = self.launches[index].repeat + sum(self.launches[reader].repeat for reader in readers)
            if readers:
                between.append(
                    Intermediate(
                        name=name,
                        shape=(shapes or {}).get(name, f"f32[{size}]"),
                        bytes=size * MIB,
                        producer=index,
                        consumers=tuple(readers),
                        bytes_moved=size * MIB * repeats,
                    )
                )
        return self.rank_of(*between, **{"catalogue": CATALOGUE, **options})

    def rank_of(self, *values: Intermediate, **options: Any) -> tuple[MissedFusion, ...]:
        """The missed fusions where only these values go from launch to launch."""
        given = {"device": DEVICE, **options}
        return rank(missed.Program(launches=self.launches, intermediates=values, decisions=self.decisions, **given))
