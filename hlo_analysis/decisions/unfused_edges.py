"""Explains why two launches of the final module stayed apart, from what the passes recorded about their edge."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from hlo_analysis.decisions import categories
from hlo_analysis.decisions.align import Origins, contents, stem, working
from hlo_analysis.decisions.edges import Edge, launch_edges
from hlo_analysis.decisions.explanations import Explanation, our_reason, without_reason, xla_reason
from hlo_analysis.decisions.fold import Folded, LastVerdict
from hlo_analysis.decisions.log import GEMM_PASS, SOFTMAX_PASS, Refusal
from hlo_analysis.decisions.roles import UNFUSIBLE_CONSUMERS, Role, library_epilogue, origin_of_kernel, role_of
from hlo_analysis.hlo import Computation, Instruction, Module
from hlo_analysis.program.launch_kinds import COLLECTIVE_OPCODES

PRIORITY_PASS = "priority-fusion"
CONFIG_PASS = "config-assigner"


class UnfusedEdges:
    """Explains the unfused edges of the final module from the records that the passes left.

    Args:
        final: the final module.
        early: the module right after priority fusion, or None where the capture has none.
        origins: final instruction → instructions of `early` that it came from.
        folded: the end state of priority fusion, with the names of `early`.
        refusals: of the passes before it, from the log.
        before: the module that priority fusion started with.
        edges: all edges of the final module.
        disabled: passes that an option switched off.
        no_record: why priority fusion left no record, where it left none.
    """

    def __init__(
        self,
        final: Module,
        early: Module | None,
        origins: Origins,
        folded: Folded | None,
        refusals: Sequence[Refusal],
        before: Module | None = None,
        edges: Sequence[Edge] = (),
        disabled: Collection[str] = (),
        no_record: str = "",
    ):
        self._no_record = no_record
        self._disabled = PRIORITY_PASS in disabled
        self._final = final.instructions
        self._module = final
        self._early_module = early
        self._early: Mapping[str, Instruction] = early.instructions if early else {}
        self._origins = origins
        self._verdicts: Mapping[str, LastVerdict] = folded.verdicts if folded else {}
        self._by_stem = {stem(name): name for name in self._verdicts}
        self._users: dict[str, set[str]] = defaultdict(set)
        for edge in launch_edges(early, working(early)) if early else ():
            self._users[edge.producer].add(edge.consumer)
        self._users_before = Counter(
            edge.producer for edge in (launch_edges(before, working(before)) if before else ())
        )
        self._refusals: dict[tuple[str, str | None], list[Refusal]] = defaultdict(list)
        for refusal in refusals:
            if refusal.pass_name == GEMM_PASS:
                self._refusals[refusal.role, refusal.product].append(refusal)
        self._feeds: dict[str, list[str]] = defaultdict(list)
        for edge in edges:
            self._feeds[edge.consumer].append(edge.producer)
        self._roots = {r.instruction: r.reason for r in refusals if r.pass_name == SOFTMAX_PASS}

    def explain(self, edge: Edge) -> Explanation:
        """Returns the reason why the two launches of an edge stayed apart."""
        if edge.crosses:
            return our_reason("the value crosses the boundary of a loop or branch", categories.BOUNDARY)
        copies = [name for name in self._inserted(edge) if self._final[name].opcode == "copy"]
        if self._early_module is not None and copies:
            return without_reason(f"{copies[0]} was put in after fusion", categories.INSERTED)
        roles = (self._role(edge.producer), self._role(edge.consumer))
        if "kernel" in roles:
            name = edge.producer if roles[0] == "kernel" else edge.consumer
            text = f"{name} is {origin_of_kernel(self._final[name])}"
            return self._opaque(edge, roles, categories.CUSTOM_KERNEL, text)
        if "library" in roles:
            return self._library(edge, roles)
        recorded = self._product(edge, roles) or self._priority(edge, roles)
        if refused := self._normalization(edge):
            return replace(recorded, reason=f"{recorded.reason} [{SOFTMAX_PASS}, which could have: {refused}]")
        return recorded

    def _normalization(self, edge: Edge) -> str | None:
        """Returns why a reduction and the operation that uses its result did not become one normalization.

        Returns None if the edge does not connect such a pair.
        """
        consumer = self._final[edge.consumer]
        if consumer.opcode != "fusion" or not self._roots or not self._after_reduction(edge.producer):
            return None
        fused = self._module.computations[consumer.called[0]]
        for inner in fused.instructions.values():
            reason = self._roots.get(inner.name) or self._roots.get(stem(inner.name))
            spread = [name for name in inner.operands if fused.instructions[name].opcode == "broadcast"]
            if reason and any(_parameters_behind(fused, name) & edge.positions for name in spread):
                return reason
        return None

    def _after_reduction(self, name: str) -> bool:
        """Whether a launch reduces, or finishes the reduction of the launch before it."""
        feeding = [self._final[source] for source in (name, *self._feeds.get(name, ()))]
        return any(inner.opcode == "reduce" for launch in feeding for inner in contents(self._module, launch))

    def _library(self, edge: Edge, roles: tuple[Role, Role]) -> Explanation:
        """Explains an edge at a library call.

        XLA chooses libraries for matrix products after all fusion, and then undoes what Triton had fused.
        """
        call = edge.producer if roles[0] == "library" else edge.consumer
        shared = set(self._origins.get(edge.producer, ())) & set(self._origins.get(edge.consumer, ()))
        if shared:
            text = f"XLA had fused the two into {min(shared)}, then took a library for the product, {call}"
            return our_reason(text, categories.LIBRARY_CALL, CONFIG_PASS)
        held = library_epilogue(self._final[call])
        text = f"{call} is a library call" + (f" with {' and '.join(held)} in its epilogue" if held else "")
        return self._opaque(edge, roles, categories.LIBRARY_CALL, text)

    def _opaque(self, edge: Edge, roles: tuple[Role, Role], category: str, text: str) -> Explanation:
        """Explains an edge at a kernel that takes no fusion, quoting what a pass said before XLA chose that kernel."""
        recorded = self._product(edge, roles) or self._priority(edge, roles)
        if recorded.verdict != "ineligible" or recorded.reason.startswith("["):
            return our_reason(text, category)
        return replace(recorded, reason=f"{recorded.reason} [{text}]", category=category)

    def _product(self, edge: Edge, roles: tuple[Role, Role]) -> Explanation | None:
        """Returns what the matrix-product rewriter said about this edge, or None if the log has no message."""
        if roles[1] in ("product", "library"):
            for product in self._products(edge.consumer):
                if refused := self._refusals.get(("prologue", product)):
                    names, op_names = self._results(edge.producer)
                    if reason := _find(refused, names, op_names):
                        return xla_reason(GEMM_PASS, reason)
        if roles[0] in ("product", "library"):
            for product in self._products(edge.producer):
                if refused := self._refusals.get(("epilogue", product)):
                    inside = contents(self._module, self._final[edge.consumer])
                    names = {name for inner in inside for name in (inner.name, stem(inner.name))}
                    if reason := _find(refused, {"", *names}, set()):
                        return xla_reason(GEMM_PASS, reason)
        return None

    def _priority(self, edge: Edge, roles: tuple[Role, Role]) -> Explanation:
        """Returns the last verdict of priority fusion on the producer, if it concerns this edge."""
        consumers = set(self._origins.get(edge.consumer, ()))
        sources = [name for name in self._origins.get(edge.producer, ()) if self._verdict(name)]
        sources.sort(key=lambda name: not self._users[name] & consumers)
        if not sources:
            return self._unrecorded(edge, roles)
        verdict = self._verdict(sources[0]) or LastVerdict(reason=None, gain_us=None)
        if verdict.reason is None:
            # XLA priced the producer for its other users, without those that read it through a bitcast.
            closed = self._takes_nothing(edge.consumer)
            return our_reason(closed, categories.CONSUMER, PRIORITY_PASS) if closed else self._priced(verdict)
        reason, category = verdict.reason, categories.classify(verdict.reason)
        if "product" in roles and category in (categories.BITCAST_USERS, categories.PRODUCER, categories.CONSUMER):
            category = categories.MATRIX_PRODUCT_OPAQUE
            count = max((self._users_before[name] for name in sources), default=0)
            if roles[0] == "product" and count > 1:
                category = categories.SEVERAL_USERS
                reason += f" [{count} instructions read the product, and only a single one can become its epilogue]"
        elif self._concerns_another(category, sources[0], consumers):
            category = categories.OTHER_CONSUMER
        return Explanation(verdict="ineligible", reason=reason, category=category, pass_name=PRIORITY_PASS)

    def _takes_nothing(self, name: str) -> str:
        """Returns why a launch can take no producer, or '' if it may."""
        opcodes = {inner.opcode for inner in contents(self._module, self._final[name])}
        if "sort" in opcodes:
            return f"{name} sorts, and takes no fusion"
        if any(opcode.removesuffix("-start") in COLLECTIVE_OPCODES for opcode in opcodes):
            return f"{name} moves data between devices, and takes no fusion"
        return ""

    def _verdict(self, name: str) -> LastVerdict | None:
        """Returns the last verdict on an instruction of the module right after priority fusion.

        At its end the pass fuses constants without recording it. Such a fusion has the verdict of its root instruction.
        """
        if name in self._verdicts or name not in self._early or self._early_module is None:
            return self._verdicts.get(name)
        instruction = self._early[name]
        if instruction.opcode != "fusion":
            return None
        root = self._early_module.computations[instruction.called[0]].root_instruction
        return self._verdicts.get(self._by_stem.get(stem(root.name), ""))

    def _priced(self, verdict: LastVerdict) -> Explanation:
        gain = verdict.gain_us
        if gain is not None and gain < 0:
            loss = f"{-gain:.1f}" if gain <= -1 else f"{-gain:.3f}"
            text = f"[the cost model: fused into all its users, {loss} µs slower than apart]"
            return Explanation(
                verdict="rejected", reason=text, category=categories.SLOWER, pass_name=PRIORITY_PASS, gain_us=gain
            )
        text = "[priority fusion priced the producer and left it unfused, without a reason]"
        return Explanation(
            verdict="unrecorded", reason=text, category=categories.UNRECORDED, pass_name=PRIORITY_PASS, gain_us=gain
        )

    def _unrecorded(self, edge: Edge, roles: tuple[Role, Role]) -> Explanation:
        if self._disabled:
            return our_reason(f"{PRIORITY_PASS} was switched off", categories.SWITCHED_OFF)
        if "product" in roles:
            text = "a Triton matrix product is closed when priority fusion runs, and the earlier pass gave no reason"
            return our_reason(text, categories.MATRIX_PRODUCT_OPAQUE)
        text, category = "no pass recorded a reason for this edge", categories.UNRECORDED
        if self._early_module is None:
            text = self._no_record
        elif moving := next(filter(self._is_old_collective, (edge.producer, edge.consumer)), None):
            text = f"{moving} moves data between devices, and takes no fusion"
            return our_reason(text, categories.PRODUCER if moving == edge.producer else categories.CONSUMER)
        elif inserted := self._inserted(edge):
            text, category = f"{inserted[0]} was put in after fusion", categories.INSERTED
        return without_reason(text, category)

    def _is_old_collective(self, name: str) -> bool:
        """Whether a collective already existed when XLA fused; a later pass makes it asynchronous and renames it."""
        opcode = self._final[name].opcode
        same = (found for found in self._early.values() if stem(found.name) == stem(name))
        return opcode in COLLECTIVE_OPCODES and any(found.opcode == opcode for found in same)

    def _inserted(self, edge: Edge) -> list[str]:
        """Returns the ends of an edge that have no origin in the module right after priority fusion."""
        return [name for name in (edge.producer, edge.consumer) if not self._origins.get(name)]

    def _concerns_another(self, category: str, producer: str, consumers: set[str]) -> bool:
        """Whether a rule concerns another user of the producer, which is fused into all its users or none."""
        own = self._users[producer] & consumers
        if not own:
            return False
        others = self._users[producer] - own
        if category == categories.CONSUMER:
            return any(map(self._is_unfusible_consumer, others)) and not any(map(self._is_unfusible_consumer, own))
        if category == categories.TWO_REDUCTIONS:
            return any(map(self._reduces, others)) and not any(map(self._reduces, own))
        return False

    def _is_unfusible_consumer(self, name: str) -> bool:
        """Whether priority fusion fuses no producer into this instruction."""
        return self._early_role(name) != "other" or self._early[name].opcode in UNFUSIBLE_CONSUMERS

    def _reduces(self, name: str) -> bool:
        module, instruction = self._early_module, self._early.get(name)
        return bool(module and instruction and any(i.opcode == "reduce" for i in contents(module, instruction)))

    def _role(self, name: str) -> Role:
        """Returns the role of a launch. A launch that a library call left over keeps the role of its matrix product."""
        role = role_of(self._module, self._final[name])
        origins = self._origins.get(name, ())
        came_out = role == "other" and origins and all(self._early_role(origin) == "product" for origin in origins)
        return "product" if came_out else role

    def _early_role(self, name: str) -> Role:
        instruction = self._early.get(name)
        return role_of(self._early_module, instruction) if self._early_module and instruction else "other"

    def _products(self, name: str) -> list[str]:
        """Returns the dots that a launch came from, by the names that the matrix-product rewriter used."""
        return [origin.removeprefix("gemm_fusion_") for origin in (*self._origins.get(name, ()), name)]

    def _results(self, name: str) -> tuple[set[str], set[str]]:
        """Returns the names that a launch's results may have had at an earlier pass, and JAX's names for them."""
        found: list[Instruction] = []
        for module, instruction in (
            (self._module, self._final[name]),
            *((self._early_module, self._early[o]) for o in self._origins.get(name, ()) if o in self._early),
        ):
            found.append(instruction)
            if instruction.opcode == "fusion" and module is not None:
                fused = module.computations[instruction.called[0]]
                root = fused.root_instruction
                found += [fused.instructions[n] for n in (root.operands if root.opcode == "tuple" else (root.name,))]
        names = {n for result in found for n in (result.name, stem(result.name.partition(".clone")[0]))}
        return names, {result.op_name for result in found if result.op_name}


def _find(refused: Sequence[Refusal], names: Collection[str], op_names: Collection[str]) -> str | None:
    """Returns the reason of the first refusal that matches one of the names, or else one of JAX's names."""
    by_name = (refusal.reason for refusal in refused if refusal.instruction in names)
    by_op_name = (refusal.reason for refusal in refused if refusal.op_name in op_names)
    return next(by_name, None) or next(by_op_name, None)


def _parameters_behind(fused: Computation, name: str) -> set[int]:
    """Returns the numbers of the parameters that a value of a fused computation depends on."""
    found: set[int] = set()
    queue, seen = [name], {name}
    while queue:
        instruction = fused.instructions[queue.pop()]
        if instruction.opcode == "parameter":
            found.add(int(instruction.literal or 0))
        new = [operand for operand in instruction.operands if operand not in seen]
        seen.update(new)
        queue += new
    return found
