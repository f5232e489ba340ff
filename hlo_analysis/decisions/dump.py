"""Reads XLA's priority-fusion dump, a text proto that the pass writes.

XLA writes it (`*.priority_fusion_dump.txt`, message `xla.gpu.FusionProcessDumpProto`) when the pass's name matches
`xla_dump_hlo_pass_re`. The reader skips fields that it does not use, such as the device and fields of later versions.
"""

from __future__ import annotations

from dataclasses import dataclass

from hlo_analysis.errors import DumpError
from hlo_analysis.targets.textproto import Message, parse_textproto


@dataclass(frozen=True, kw_only=True, slots=True)
class Fused:
    """The pass fused `producer` into `consumer`; the result is called `fusion` (often the consumer's old name)."""

    fusion: str
    producer: str
    consumer: str
    gain_us: float | None = None
    """XLA's estimate when it chose the edge, over all users of the producer; None for bitcasts, which it never prices.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Priced:
    """The cost model priced fusing `producer` into its users.

    Both times are in µs. They are increments since the last look at the same producer, so they may be negative.
    """

    producer: str
    us_fused: float
    us_unfused: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A rule forbade fusing `producer` into one of its users, and therefore into any of them."""

    producer: str
    reason: str


Step = Fused | Priced | Refused


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionDump:
    """The steps of the pass in order, and the module that it started with."""

    steps: tuple[Step, ...]
    module_text: str


def read_fusion_dump(text: str) -> FusionDump:
    """Reads the text of a `*.priority_fusion_dump.txt`.

    XLA writes the module last, so a dump without a module is incomplete.

    Raises:
        DumpError: the text is not such a dump, or was cut off.
    """
    try:
        dump = parse_textproto(text)
        steps = tuple(step for found in dump.messages("fusion_steps") if (step := _step(found)) is not None)
    except (DumpError, ValueError, RecursionError) as error:
        raise DumpError(
            f"expected XLA's priority-fusion dump, a text proto; it stops making sense: {error}. "
            "It may have been cut off while XLA was writing it: capture again."
        ) from error
    module_text = dump.scalar("hlo_module_before_fusion")
    if not module_text:
        raise DumpError(
            "expected a priority-fusion dump that ends with hlo_module_before_fusion; this one has none. "
            "It was cut off while XLA was writing it: capture again."
        )
    return FusionDump(steps=steps, module_text=module_text)


def _step(step: Message) -> Step | None:
    for kind, found in step.fields:
        if not isinstance(found, Message):
            continue
        producer = found.scalar("producer_name")
        match kind:
            case "fusion":
                return Fused(
                    fusion=found.scalar("fusion_name"), producer=producer, consumer=found.scalar("consumer_name")
                )
            case "update_priority":
                return Priced(
                    producer=producer,
                    us_fused=float(found.scalar("us_fused", "0")),
                    us_unfused=float(found.scalar("us_unfused", "0")),
                )
            case "producer_ineligible":
                return Refused(producer=producer, reason=found.scalar("reason"))
    return None
