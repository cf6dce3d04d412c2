"""Graphs with the data of a tensor in an external file, in every place and encoding that there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx
from google.protobuf.message import Message
from onnx import AttributeProto, ModelProto, SparseTensorProto, TensorProto, helper

from tests.model_store.forgeries import adding, external

NAME = "7" * 64
WEIGHT = external(NAME)
X, Y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in ("x", "y"))
ADD = helper.make_node("Add", ["x", "w"], ["y"])


def constant(weight: TensorProto = WEIGHT) -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["w"], value=weight)


def model(*nodes: onnx.NodeProto, initializers: tuple[TensorProto, ...] = ()) -> ModelProto:
    graph = helper.make_graph(list(nodes), "net", [X], [Y], list(initializers))
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def branching(*nodes: onnx.NodeProto, initializers: tuple[TensorProto, ...] = ()) -> ModelProto:
    yes = helper.make_graph([*nodes, helper.make_node("Add", ["x", "w"], ["sum"])], "yes", [], [], list(initializers))
    no = helper.make_graph([helper.make_node("Identity", ["x"], ["same"])], "no", [], [])
    for graph, name in ((yes, "sum"), (no, "same")):
        graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]))
    truth = helper.make_node("Constant", [], ["truth"], value=helper.make_tensor("", TensorProto.BOOL, [], [True]))
    return model(truth, helper.make_node("If", ["truth"], ["y"], then_branch=yes, else_branch=no))


def function(*nodes: onnx.NodeProto, default: TensorProto | None = None) -> ModelProto:
    made = model(helper.make_node("Plus", ["x"], ["y"], domain="own"))
    defaults = [] if default is None else [helper.make_attribute("value", default)]
    opsets = [helper.make_opsetid("", 20)]
    made.functions.append(
        helper.make_function("own", "Plus", ["x"], ["y"], [*nodes, ADD], opsets, attribute_protos=defaults)
    )
    return made


def by_default() -> ModelProto:
    node = helper.make_node("Constant", [], ["w"])
    node.attribute.add(name="value", ref_attr_name="value", type=AttributeProto.TENSOR)
    return function(node, default=WEIGHT)


def sparse(values: TensorProto = WEIGHT) -> SparseTensorProto:
    return SparseTensorProto(values=values, indices=helper.make_tensor("", TensorProto.INT64, [3], [0, 1, 2]), dims=[3])


def sparse_initializer() -> ModelProto:
    made = model(ADD)
    made.graph.sparse_initializer.append(sparse())
    return made


def filled() -> ModelProto:
    one = TensorProto()
    one.CopyFrom(WEIGHT)
    one.dims[:] = [1]
    one.external_data[2].value = "4"
    shape = helper.make_tensor("shape", TensorProto.INT64, [1], [3])
    return model(helper.make_node("ConstantOfShape", ["shape"], ["w"], value=one), ADD, initializers=(shape,))


def training() -> ModelProto:
    made = model(helper.make_node("Identity", ["x"], ["y"]))
    made.training_info.add().initialization.initializer.append(WEIGHT)
    return made


def listed() -> ModelProto:
    made = model(helper.make_node("Identity", ["x"], ["y"]))
    made.graph.node[0].attribute.append(helper.make_attribute("own", [WEIGHT]))
    return made


PLACES: dict[str, Callable[[], ModelProto]] = {
    "an initializer": lambda: ModelProto.FromString(adding(WEIGHT)),
    "a constant": lambda: model(constant(), ADD),
    "an initializer of a branch": lambda: branching(initializers=(WEIGHT,)),
    "a constant of a branch": lambda: branching(constant()),
    "a constant of a function": lambda: function(constant()),
    "a function's default": by_default,
    "a sparse initializer": sparse_initializer,
    "a sparse constant": lambda: model(helper.make_node("Constant", [], ["w"], sparse_value=sparse()), ADD),
    "what another operator takes": filled,
    "what training begins with": training,
    "a list of tensors": listed,
}


def seen(message: Message) -> Iterator[bytes]:
    """Yield the files that the onnx package finds, in messages of every kind."""
    if isinstance(message, TensorProto):
        for item in message.external_data:
            if item.key == "location":  # text that is not UTF-8 is bytes
                yield item.value if isinstance(item.value, bytes) else item.value.encode()
    for kind, value in message.ListFields():
        if kind.message_type is not None:
            for inner in [value] if isinstance(value, Message) else value:
                yield from seen(inner)


def varint(value: int, size: int = 1) -> bytes:
    """Encode an integer in at least ``size`` bytes."""
    found: list[int] = []
    while value > 0x7F or len(found) < size - 1:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])


def field(number: int, *contents: bytes, size: int = 1) -> bytes:
    """Encode a message or text; ``size`` is that of the tag and of the length."""
    content = b"".join(contents)
    return varint(number << 3 | 2, size) + varint(len(content), size) + content


def entry(key: str, value: str) -> bytes:
    return field(1, key.encode()) + field(2, value.encode())


HEAD = b"\x08\x0a" + field(8, b"\x10\x14")  # the ONNX version, and that of the operators
OTHER = ("offset", "0"), ("length", "12")
EXTERNAL = b"\x70\x01"
REST = b"\x08\x03\x10\x01" + field(8, b"w") + EXTERNAL + b"".join(field(13, entry(*item)) for item in OTHER)
SPOT = field(13, entry("location", NAME))
NET = b"".join(field(number, item.SerializeToString()) for number, item in ((1, ADD), (11, X), (12, Y))) + field(
    2, b"net"
)


def encoded(*tensor: bytes, size: int = 1) -> bytes:
    return HEAD + field(7, NET, field(5, *tensor, size=size), size=size)


def replaced(first: bytes, second: bytes) -> bytes:
    """Return a model with one singular field twice: parsers merge the two."""
    node = field(1, field(2, b"w"), field(4, b"Constant"), field(5, field(1, b"value"), b"\xa0\x01\x04", first, second))
    return HEAD + field(7, node, NET)


TRICKS = {
    "plain": encoded(REST, SPOT),
    "longer tags and lengths than need be": encoded(REST, field(13, entry("location", NAME), size=5), size=5),
    "the graph in two pieces": HEAD + field(7, NET) + field(7, field(5, REST, SPOT)),
    "a tensor in two pieces": replaced(field(5, REST), field(5, SPOT)),
    "a tensor in two pieces, the other way round": replaced(field(5, SPOT), field(5, REST)),
    "a key that replaces another": encoded(REST, field(13, field(1, b"checksum"), entry("location", NAME))),
    "a value before its key": encoded(REST, field(13, field(2, NAME.encode()), field(1, b"location"))),
    "a field that ONNX lacks before it": encoded(field(15, b"much"), b"\x79" + bytes(8), REST, SPOT),
    "eight bytes that are a number": encoded(b"\x79location", REST, SPOT),
    "numbers one by one": encoded(b"\x38\x01" * 3, REST, SPOT),
}
