"""jaxlib's own parser as an oracle for ours: its Python objects, and the protobuf that it writes."""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from jaxlib import _hlo

from hlo_analysis.hlo import Computation, Module, SourceFrame

# The fields of xla/service/hlo.proto that are compared: name, number, type (a message of this table, or a scalar).
_MESSAGES = {
    "Module": [
        ("entry_computation_name", 2, "string"),
        ("computations", 3, "*Computation"),
        ("stack_frame_index", 17, "StackFrameIndex"),
    ],
    "Computation": [
        ("name", 1, "string"),
        ("instructions", 2, "*Instruction"),
        ("id", 5, "int64"),
        ("root_id", 6, "int64"),
    ],
    "Instruction": [
        ("name", 1, "string"),
        ("opcode", 2, "string"),
        ("metadata", 7, "Metadata"),
        ("custom_call_target", 28, "string"),
        ("id", 35, "int64"),
        ("operand_ids", 36, "*int64"),
        ("called_computation_ids", 38, "*int64"),
    ],
    "Metadata": [
        ("op_name", 2, "string"),
        ("source_file", 3, "string"),
        ("source_line", 4, "int32"),
        ("stack_frame_id", 15, "int32"),
    ],
    "StackFrameIndex": [
        ("file_names", 1, "*string"),
        ("function_names", 2, "*string"),
        ("file_locations", 3, "*FileLocation"),
        ("stack_frames", 4, "*StackFrame"),
    ],
    "FileLocation": [
        ("file_name_id", 1, "int32"),
        ("function_name_id", 2, "int32"),
        ("line", 3, "int32"),
        ("column", 4, "int32"),
        ("end_line", 5, "int32"),
        ("end_column", 6, "int32"),
    ],
    "StackFrame": [("file_location_id", 1, "int32"), ("parent_frame_id", 2, "int32")],
}
_ASYNC = ("async-start", "async-update", "async-done")


@cache
def _module_message() -> type[Any]:
    file = descriptor_pb2.FileDescriptorProto(name="oracle.proto", package="oracle", syntax="proto3")
    field_types = descriptor_pb2.FieldDescriptorProto
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field_name, number, kind in fields:
            field = message.field.add(name=field_name, number=number)
            field.label = field_types.LABEL_REPEATED if kind.startswith("*") else field_types.LABEL_OPTIONAL
            kind = kind.removeprefix("*")
            if kind in _MESSAGES:
                field.type = field_types.TYPE_MESSAGE
                field.type_name = f".oracle.{kind}"
            else:
                field.type = getattr(field_types, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("oracle.Module"))


def assert_agrees(module: Module, text: str) -> int:
    """Assert that `module`, parsed from `text`, is what jaxlib parses; returns the number of instructions compared."""
    oracle = _hlo.hlo_module_from_text(text)
    proto = _module_message().FromString(oracle.as_serialized_hlo_module_proto())
    assert module.name == oracle.name
    assert module.entry_name == proto.entry_computation_name
    theirs = {computation.name: computation for computation in oracle.computations()}
    protos = {computation.name: computation for computation in proto.computations}
    # Text may abbreviate an asynchronous operation; jaxlib makes the computation around it again.
    for name in set(theirs) - set(module.computations):
        assert f"{name} " not in text
        assert len(theirs[name].instructions()) == len(theirs[name].instructions()[-1].operands()) + 1
    assert set(module.computations) <= set(theirs)
    names = {computation.id: computation.name for computation in proto.computations}
    return sum(
        _assert_computation_agrees(computation, theirs[name], protos[name], names, proto.stack_frame_index)
        for name, computation in module.computations.items()
    )


def _assert_computation_agrees(
    computation: Computation, oracle: Any, proto: Any, computation_names: dict[int, str], frames: Any
) -> int:
    ours = list(computation.instructions.values())
    theirs = oracle.instructions()
    messages = {message.name: message for message in proto.instructions}
    assert len(ours) == len(theirs) == len(messages), computation.name
    our_name = {their.name: our.name for our, their in zip(ours, theirs, strict=True)}
    by_id = {message.id: our_name[message.name] for message in proto.instructions}
    assert computation.root == by_id[proto.root_id]
    for our, their in zip(ours, theirs, strict=True):
        message = messages[their.name]
        if "#" in our.name:  # an abbreviated get-tuple-element, which jaxlib names a_0, or a_0.1 if that is taken
            assert their.name.startswith(our.name.replace("#", "_"))
        else:
            assert our.name == their.name
        assert our.is_root == (message.id == proto.root_id)
        assert (
            our.operands == tuple(by_id[number] for number in message.operand_ids) == _names(their.operands, our_name)
        )
        assert sorted(computation.users(our.name)) == sorted(_names(their.users, our_name)), our.text
        # jaxlib drops the layout `{:E(4)}` of a scalar constant.
        is_scalar_constant = our.opcode == "constant" and not our.shape.dimensions and not our.shape.is_tuple
        shape = str(our.shape) if is_scalar_constant else our.shape.text
        assert their.to_string().startswith(f"%{their.name} = {shape} "), (our, their.to_string())
        assert our.op_name == message.metadata.op_name
        stack = our.metadata.frames if our.metadata else ()
        if message.metadata.stack_frame_id:
            assert stack == _stack(frames, message.metadata.stack_frame_id), our.text
        else:
            assert [(frame.file, frame.line) for frame in stack] == (
                [(message.metadata.source_file, message.metadata.source_line)] if message.metadata.source_file else []
            )
        called = tuple(computation_names[number] for number in message.called_computation_ids)
        if message.opcode in _ASYNC and our.opcode != message.opcode:
            assert our.opcode.endswith(message.opcode.removeprefix("async"))
        else:
            assert our.opcode == message.opcode
            if not (message.opcode in _ASYNC and not our.called):  # an update or done names no computation in text
                assert sorted(our.called) == sorted(called), our.text
        target = our.attributes.get("custom_call_target")
        assert target is None or target.strip('"') == message.custom_call_target or "\\" in target or our.called
    return len(ours)


def _stack(index: Any, number: int) -> tuple[SourceFrame, ...]:
    """The frames from `number` outwards; ids count from 1 in the protobuf, and 0 is none."""
    frames = []
    while number and index.stack_frames:
        frame = index.stack_frames[number - 1]
        location = index.file_locations[frame.file_location_id - 1]
        frames.append(SourceFrame(file=index.file_names[location.file_name_id - 1], line=location.line))
        number = frame.parent_frame_id
    return tuple(frames)


def _names(instructions: Any, our_name: dict[str, str]) -> tuple[str, ...]:
    return tuple(our_name[instruction.name] for instruction in instructions())
