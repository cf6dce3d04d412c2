"""Every file that an engine would open for a graph is found in advance, as ONNX Runtime and onnx confirm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, helper

from ingot.errors import InvalidArchive, InvalidArgument
from ingot.model_store.format import onnx_wire
from ingot.runtime import EngineSpec, load_engine
from tests.model_store.outside import (
    EXTERNAL,
    HEAD,
    NAME,
    PLACES,
    REST,
    SPOT,
    TRICKS,
    encoded,
    entry,
    field,
    model,
    seen,
    varint,
)


def engine_opens(content: bytes, folder: Path) -> bool | None:
    """Return whether ONNX Runtime needs the file to load the model; None if it refuses the model in any case."""
    path = folder / "model.onnx"
    path.write_bytes(content)
    alone = loads(path)
    (folder / NAME).write_bytes(np.ones(3, np.float32).tobytes())
    return not alone if loads(path) else None


def loads(path: Path) -> bool:
    try:
        load_engine(EngineSpec(path, device="cpu", threads=1)).close()
    except InvalidArgument:
        return False
    return True


def names(graph: bytes) -> list[str]:
    return [location.decode() for location in onnx_wire.locations(graph)]


# ONNX Runtime reads all but these two: it does not train, and knows no operator that takes a list.
UNREAD = {"what training begins with": False, "a list of tensors": None}


class TestPlaces:
    @pytest.mark.parametrize("place", PLACES)
    def test_files_that_the_engine_opens_are_found(self, place: str, tmp_path: Path) -> None:
        graph = PLACES[place]().SerializeToString()
        assert engine_opens(graph, tmp_path) is UNREAD.get(place, True)
        assert names(graph) == [NAME]

    def test_the_fields_are_those_of_the_onnx_package(self) -> None:
        described = {item.name: item for item in messages(ModelProto.DESCRIPTOR)}
        known: dict[str, onnx_wire.Message] = {}
        left = [onnx_wire.MODEL]
        while left:
            kind = left.pop()
            if kind.name not in known:
                known[kind.name] = kind
                left.extend(kind.messages.values())
        for name, kind in known.items():
            inner = [item for item in described[name].fields if item.message_type is not None]
            carriers = {item.number: item.message_type.name for item in inner if carries_tensors(item.message_type)}
            if name == "TensorProto":
                carriers[TensorProto.EXTERNAL_DATA_FIELD_NUMBER] = "StringStringEntryProto"
            assert carriers == {number: item.name for number, item in kind.messages.items()}, name
            assert {item.number for item in described[name].fields} - carriers.keys() <= kind.others, name


def messages(kind: Any) -> Sequence[Any]:
    """Return the descriptor of a kind of message, and those of all that can be in it."""
    found = {kind.full_name: kind}
    left = [kind]
    while left:
        for item in left.pop().fields:
            inner = item.message_type
            if inner is not None and inner.full_name not in found:
                found[inner.full_name] = inner
                left.append(inner)
    return list(found.values())


def carries_tensors(kind: Any) -> bool:
    return any(item.name == "TensorProto" for item in messages(kind))


class TestEncodings:
    @pytest.mark.parametrize("trick", TRICKS)
    def test_nothing_hides_a_file_that_the_engine_opens(self, trick: str, tmp_path: Path) -> None:
        assert engine_opens(TRICKS[trick], tmp_path) is True
        assert names(TRICKS[trick]) == [NAME]

    def test_of_two_names_both_count(self, tmp_path: Path) -> None:
        other = "8" * 64
        for pair in ((other, NAME), (NAME, other)):
            spots = [field(13, entry("location", name)) for name in pair]
            assert names(encoded(REST, *spots)) == list(pair)
            assert names(encoded(REST, field(13, *(entry("location", name) for name in pair)))) == list(pair)
        assert engine_opens(encoded(REST, field(13, entry("location", other), field(2, NAME.encode()))), tmp_path)

    def test_a_tensor_that_is_not_outside_counts_too(self) -> None:
        assert names(encoded(REST.replace(EXTERNAL, b""), SPOT)) == [NAME]
        assert names(encoded(REST, field(13, field(1, b"location")))) == [""]

    def test_text_that_looks_like_a_file_name_is_ignored(self) -> None:
        label = onnx.numpy_helper.from_array(np.array(["location", NAME], dtype=object), "w")
        made = model(helper.make_node("Identity", ["x"], ["y"], name=f"location {NAME}"), initializers=(label,))
        made.graph.doc_string = made.producer_name = f"location {NAME}"
        helper.set_model_props(made, {"location": NAME})
        assert names(made.SerializeToString()) == []


def nested(depth: int) -> bytes:
    inner = field(5, REST, SPOT)
    for _ in range(depth):
        inner = field(1, field(5, field(6, inner)))
    return HEAD + field(7, inner)


BROKEN = {
    "cut off": (encoded(REST, SPOT)[:-1], "its encoding is damaged"),
    "longer than what it is in": (HEAD + varint(7 << 3 | 2) + b"\x7f" + field(5, REST, SPOT)[:90], "damaged"),
    "a group": (HEAD + b"\x5b" + field(7, field(5, SPOT)) + b"\x5c", "wire type 3"),
    "the end of a group": (HEAD + b"\x3c" + field(7, field(5, SPOT)), "wire type 4"),
    "a wire type that there is not": (HEAD + b"\x3f" + field(7, field(5, SPOT)), "wire type 7"),
    "field 0": (HEAD + b"\x02\x01a" + field(7, field(5, SPOT)), "damaged"),
    "a tag over 32 bits": (HEAD + b"\xba\x80\x80\x80\x10" + varint(len(SPOT)) + SPOT, "damaged"),
    "a tag of six bytes": (HEAD + varint(7 << 3 | 2, 6) + varint(len(SPOT)) + SPOT, "damaged"),
    "a length over 32 bits": (HEAD + b"\x3a" + varint(len(SPOT) + (1 << 32)) + SPOT, "damaged"),
    "a number of eleven bytes": (HEAD + b"\x08" + b"\x80" * 10 + b"\x00" + field(7, field(5, SPOT)), "damaged"),
    "a field that ONNX lacks": (HEAD + field(7, field(99, field(13, SPOT))), "field 99 of a GraphProto, at byte"),
    "too deep": (nested(40), "more than 100 nested messages"),
}


class TestRefusals:
    @pytest.mark.parametrize("what", BROKEN)
    def test_unreadable_graphs_that_name_files_are_refused(self, what: str) -> None:
        graph, message = BROKEN[what]
        with pytest.raises(InvalidArchive, match=message):
            onnx_wire.locations(graph)

    def test_a_bound_on_work(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert names(nested(32)) == [NAME]
        monkeypatch.setattr(onnx_wire, "MAX_FIELDS", 1000)
        with pytest.raises(InvalidArchive, match="more than 1000 fields"):
            onnx_wire.locations(HEAD + field(7, field(1) * 1000, field(5, SPOT)))
        assert names(HEAD + field(7, field(5, SPOT), field(1) * 1000)) == [NAME]


def tensors(draw: st.DrawFn) -> TensorProto:
    made = TensorProto(name=draw(TEXTS), raw_data=draw(st.binary(max_size=9)), string_data=[b"location", NAME.encode()])
    for key, value in draw(st.lists(st.tuples(st.sampled_from(["location", "offset", "key"]), TEXTS), max_size=3)):
        made.external_data.add(key=key, value=value)
    return made


TEXTS = st.sampled_from(["", "location", NAME, "../up", "/etc/passwd", "w"])


def graphs(draw: st.DrawFn, depth: int = 0) -> GraphProto:
    made = GraphProto(name=draw(TEXTS), initializer=[tensors(draw) for _ in range(draw(st.integers(0, 2)))])
    if draw(st.booleans()):
        made.sparse_initializer.add(values=tensors(draw), indices=tensors(draw), dims=[1, 300])
    for _ in range(draw(st.integers(0, 2))):
        made.node.add(op_type=draw(TEXTS), attribute=[attributes(draw, depth)])
    return made


def attributes(draw: st.DrawFn, depth: int) -> AttributeProto:
    made = AttributeProto(name=draw(TEXTS), s=b"location", ints=[1, -1], floats=[0.5])
    match draw(st.integers(0, 5 if depth < 2 else 3)):
        case 0:
            made.t.CopyFrom(tensors(draw))
        case 1:
            made.tensors.append(tensors(draw))
        case 2:
            made.sparse_tensor.indices.CopyFrom(tensors(draw))
        case 3:
            made.sparse_tensors.add().values.CopyFrom(tensors(draw))
        case 4:
            made.g.CopyFrom(graphs(draw, depth + 1))
        case _:
            made.graphs.append(graphs(draw, depth + 1))
    return made


@st.composite
def models(draw: st.DrawFn) -> ModelProto:
    made = ModelProto(ir_version=10, graph=graphs(draw), doc_string=draw(TEXTS))
    made.functions.add(attribute_proto=[attributes(draw, 1)]).node.add(attribute=[attributes(draw, 1)])
    made.training_info.add(algorithm=graphs(draw, 1), initialization=graphs(draw, 1))
    return made


class TestAgainstOnnx:
    @pytest.mark.matrix
    @given(made=models())
    def test_all_files_that_onnx_knows_of_are_found_and_no_others(self, made: ModelProto) -> None:
        assert set(onnx_wire.locations(made.SerializeToString())) == set(seen(made))

    @given(made=models(), extra=models(), position=st.floats(0, 1), byte=st.integers(0, 255), cut=st.booleans())
    @pytest.mark.matrix
    def test_of_damaged_and_merged_graphs_none_is_missed(
        self, made: ModelProto, extra: ModelProto, position: float, byte: int, cut: bool
    ) -> None:
        content = bytearray(made.SerializeToString() + extra.SerializeToString())
        at = int(position * (len(content) - 1))
        content[at] = byte
        if cut:
            del content[at:]
        try:
            known = set(seen(ModelProto.FromString(bytes(content))))
            assert known <= set(onnx_wire.locations(bytes(content)))
        except (DecodeError, InvalidArchive):
            return
