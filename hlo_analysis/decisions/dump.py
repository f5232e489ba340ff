"""Reader of XLA's priority-fusion dump, the text proto that the pass leaves behind.

XLA writes it (`*.priority_fusion_dump.txt`, message `xla.gpu.FusionProcessDumpProto`) when the pass's name matches
`xla_dump_hlo_pass_re`. The fields used here are declared below and everything else (the device, fields of later
versions) is skipped, so that the reader depends on no generated code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory, text_format

from hlo_analysis.errors import DumpError

_PACKAGE = "hlo_analysis.fusion_dump"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fused:
    """The pass fused `producer` into `consumer`; the result is called `fusion` (often the consumer's old name)."""

    fusion: str
    producer: str
    consumer: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """The cost model priced fusing `producer` into its users.

    The two times (µs) are increments over the last look at the same producer, and so may be negative.
    """

    producer: str
    consumers: tuple[str, ...]
    us_fused: float
    us_unfused: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A rule forbade fusing `producer` into one of its users, and thereby into all of them."""

    producer: str
    reason: str


Step = Fused | Priced | Refused


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionDump:
    """What the pass did, in order, and the module that it began with."""

    steps: tuple[Step, ...]
    module_text: str


@cache
def _message_class() -> type[message.Message]:
    """FusionProcessDumpProto, reduced to the fields that are read; field names as in XLA, numbers are our own."""
    string, double = descriptor_pb2.FieldDescriptorProto.TYPE_STRING, descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE
    one, many = descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL, descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
    file = descriptor_pb2.FileDescriptorProto(name="hlo_analysis/fusion_dump.proto", package=_PACKAGE, syntax="proto3")

    def declare(name: str, *fields: tuple[str, int | str, descriptor_pb2.FieldDescriptorProto.Label.ValueType]) -> None:
        declared = file.message_type.add(name=name)
        for number, (field, kind, label) in enumerate(fields, start=1):
            entry = declared.field.add(name=field, number=number, label=label)
            if isinstance(kind, str):
                entry.type, entry.type_name = entry.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                entry.type = kind  # pyright: ignore[reportAttributeAccessIssue]

    declare("Fusion", *((name, string, one) for name in ("fusion_name", "producer_name", "consumer_name")))
    declare(
        "Priority",
        ("producer_name", string, one),
        ("consumer_names", string, many),
        ("us_fused", double, one),
        ("us_unfused", double, one),
    )
    declare("Ineligible", ("producer_name", string, one), ("reason", string, one))
    declare(
        "Step",
        ("fusion", "Fusion", one),
        ("update_priority", "Priority", one),
        ("producer_ineligible", "Ineligible", one),
    )
    declare("Dump", ("fusion_steps", "Step", many), ("hlo_module_before_fusion", string, one))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.Dump"))


def read_fusion_dump(text: str) -> FusionDump:
    """Read the text of a `*.priority_fusion_dump.txt`.

    Raises `DumpError` where the text is not such a dump or was cut off: XLA writes the module last, so that a dump
    without one is not whole.
    """
    dump = _message_class()()
    try:
        text_format.Parse(text, dump, allow_unknown_field=True)
    except (text_format.ParseError, ValueError, RecursionError, Warning) as error:  # it may warn of a broken escape
        raise DumpError(
            f"expected XLA's priority-fusion dump, a text proto; it stops making sense: {error}. "
            "It may have been cut off while XLA was writing it: capture again."
        ) from error
    module_text = dump.hlo_module_before_fusion  # pyright: ignore[reportAttributeAccessIssue]
    if not module_text:
        raise DumpError(
            "expected a priority-fusion dump that ends with hlo_module_before_fusion; this one has none. "
            "It was cut off while XLA was writing it: capture again."
        )
    steps = tuple(_step(step) for step in dump.fusion_steps)  # pyright: ignore[reportAttributeAccessIssue]
    return FusionDump(steps=tuple(step for step in steps if step is not None), module_text=module_text)


def _step(step) -> Step | None:
    if step.HasField("fusion"):
        fusion = step.fusion
        return Fused(fusion=fusion.fusion_name, producer=fusion.producer_name, consumer=fusion.consumer_name)
    if step.HasField("update_priority"):
        priced = step.update_priority
        return Priced(
            producer=priced.producer_name,
            consumers=tuple(priced.consumer_names),
            us_fused=priced.us_fused,
            us_unfused=priced.us_unfused,
        )
    if step.HasField("producer_ineligible"):
        return Refused(producer=step.producer_ineligible.producer_name, reason=step.producer_ineligible.reason)
    return None
