"""Tests of the onnx package: each case that plain ONNX Runtime passes also passes imported, rewritten and served."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import numpy_helper
from onnx.backend.test.loader import load_model_tests
from onnx.backend.test.runner import Runner

from ingot.errors import InvalidArgument
from ingot.export.program import quiet
from ingot.export.rewrite import rules
from ingot.export.rewrite.passes.manager import OnnxPass, PassManager
from ingot.model_store import BlobFolder
from ingot.model_store.format import onnx_graph
from ingot.runtime import EngineSpec, load_engine
from ingot.tensors import Array

DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"

# Sequences and optional values are not tensors: such a model is imported, rewritten and packed, but not served.
NOT_TENSORS = {
    "test_identity_opt",
    "test_identity_sequence",
    "test_if_opt",
    "test_if_seq",
    "test_loop13_seq",
    "test_sequence_insert_at_back",
    "test_sequence_insert_at_front",
    "test_sequence_map_add_1_sequence_1_tensor",
    "test_sequence_map_add_1_sequence_1_tensor_expanded",
    "test_sequence_map_add_2_sequences",
    "test_sequence_map_add_2_sequences_expanded",
    "test_sequence_map_extract_shapes",
    "test_sequence_map_extract_shapes_expanded",
    "test_sequence_map_identity_1_sequence",
    "test_sequence_map_identity_1_sequence_1_tensor",
    "test_sequence_map_identity_1_sequence_1_tensor_expanded",
    "test_sequence_map_identity_1_sequence_expanded",
    "test_sequence_map_identity_2_sequences",
    "test_sequence_map_identity_2_sequences_expanded",
    "test_split_to_sequence_1",
    "test_split_to_sequence_2",
    "test_split_to_sequence_nokeepdims",
}
# Their ``Range`` is given vectors of one element, against its definition; the engine sees that once they are constants.
# The proof after each rule finds it, and the rule's result is discarded.
REJECTED = {
    "constant-folding: test_affine_grid_2d_expanded",
    "constant-folding: test_affine_grid_2d_align_corners_expanded",
}


@dataclass(frozen=True)
class Case:
    """A model, inputs and expected outputs."""

    name: str
    model: bytes
    data: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    rtol: float
    atol: float

    def check(self, index: int, outputs: Sequence[Any]) -> None:
        Runner.assert_similar_outputs(self.data[index][1], outputs, self.rtol, self.atol)

    def run(self, model: str | bytes) -> None:
        """Run a model in plain ONNX Runtime and check its outputs."""
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.intra_op_num_threads = 2
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"], enable_fallback=0)
        names = [node.name for node in session.get_inputs()]
        for index, (inputs, _) in enumerate(self.data):
            self.check(index, session.run(None, dict(zip(names, inputs, strict=True))))

    def serve(self, path: Path) -> None:
        """Run a packed model in the engine and check its outputs."""
        engine = load_engine(EngineSpec(path, device="cpu", threads=2))
        for index, (inputs, _) in enumerate(self.data):
            names = [spec.name for spec in engine.signature.inputs]
            outputs = engine.run(dict(zip(names, inputs, strict=True)))
            self.check(index, [as_text(outputs[spec.name]) for spec in engine.signature.outputs])


def as_text(array: Array) -> Array:
    """Return strings as ``str``, as the expected outputs have them; the engine returns bytes."""
    if array.dtype != object:
        return array
    return np.array([item.decode() for item in array.reshape(-1)], dtype=object).reshape(array.shape)


def as_value(item: Any) -> Any:
    """Return a tensor as an array; the tests have scalars and protobuf messages too."""
    if isinstance(item, onnx.TensorProto):
        return numpy_helper.to_array(item)
    return item if item is None or isinstance(item, list) else np.asarray(item)


def load_values(folder: Path, name: str, infos: Sequence[onnx.ValueInfoProto]) -> list[Any]:
    contents = [(folder / f"{name}_{index}.pb").read_bytes() for index in range(len(list(folder.glob(f"{name}_*.pb"))))]
    return [
        numpy_helper.to_list(onnx.SequenceProto.FromString(content))
        if info.type.HasField("sequence_type")
        else numpy_helper.to_array(onnx.TensorProto.FromString(content))
        for content, info in zip(contents, infos, strict=False)
    ]


def node_cases() -> Iterator[Case]:
    """Yield one case for each use of an operator, most also with the operator written out."""
    for case in load_model_tests(kind="node"):
        assert case.model is not None
        assert case.data_sets is not None
        data = [tuple([as_value(item) for item in part] for part in pair) for pair in case.data_sets]
        yield Case(case.name, case.model.SerializeToString(), data, case.rtol, case.atol)  # type: ignore[arg-type]


def stored_cases(kind: str) -> Iterator[Case]:
    """Yield the cases stored as files: small graphs, and exports of older PyTorch."""
    for case in load_model_tests(kind=kind):
        folder = Path(case.model_dir or "")
        model = onnx.load(folder / "model.onnx")
        data = []
        for part in sorted(folder.glob("test_data_set_*")):
            # Inputs that are weights too come last and have no file.
            data.append(
                (load_values(part, "input", model.graph.input), load_values(part, "output", model.graph.output))
            )
        yield Case(case.name, model.SerializeToString(), data, case.rtol, case.atol)


def light_cases() -> Iterator[Case]:
    """Yield well-known image models, whose weights are computed so that their files are small."""
    for case in load_model_tests(kind="real"):
        path = DATA / "light" / Path(case.url or "").name
        model = onnx.load(path)
        constants = {tensor.name for tensor in model.graph.initializer}
        info = next(info for info in model.graph.input if info.name not in constants)
        sizes = [dim.dim_value for dim in info.type.tensor_type.shape.dim]
        count = int(np.prod(sizes))
        image = (np.arange(count).reshape(sizes) / count).astype(np.float32)
        output = onnx.load_tensor(path.with_name(f"{path.stem}_output_0.pb"))
        yield Case(case.name, path.read_bytes(), [([image], [numpy_helper.to_array(output)])], case.rtol, case.atol)


@dataclass
class Outcome:
    """The outcomes of the cases of a group."""

    passed: int = 0
    refused: set[str] = field(default_factory=set)
    rejected: set[str] = field(default_factory=set)
    failures: list[str] = field(default_factory=list)


def follow(cases: Iterator[Case], folder: Path) -> Outcome:
    """Import, rewrite, pack and serve the cases that plain ONNX Runtime passes."""
    chosen = rules.select(["all"])[1]
    outcome = Outcome()
    with quiet():
        for case in cases:
            try:
                case.run(case.model)
            except Exception:  # noqa: BLE001 - any failure of plain ONNX Runtime skips the case
                continue
            try:
                follow_one(case, chosen, folder, outcome)
            except Exception as error:  # noqa: BLE001 - one failure must not hide the others
                outcome.failures.append(f"{case.name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            outcome.passed += 1
    return outcome


def follow_one(case: Case, chosen: Sequence[OnnxPass], folder: Path, outcome: Outcome) -> None:
    def prove(model: ir.Model) -> float:
        case.run(ir.to_proto(model).SerializeToString())
        return 0.0

    source = folder / "model.onnx"
    source.write_bytes(case.model)
    model, records = PassManager(chosen, prove).run(onnx_graph.load(source))
    outcome.rejected |= {f"{record.rule}: {case.name}" for record in records if record.rejected}
    blobs = BlobFolder(folder)
    packed = blobs.path(onnx_graph.pack(model, blobs)[0])
    assert packed.stat().st_size < 2 * len(case.model) + 4096, "the rules have blown the file up"
    try:
        case.serve(packed)
    except InvalidArgument as error:
        if "only tensors can be served" not in str(error):
            raise
        outcome.refused.add(case.name)
        case.run(str(packed))


def expect(outcome: Outcome, at_least: int) -> None:
    shown = "\n".join(outcome.failures)
    assert not outcome.failures, f"{len(outcome.failures)} of {outcome.passed} cases that ONNX Runtime passes:\n{shown}"
    assert outcome.passed >= at_least


@pytest.mark.long
def test_operators_and_the_functions_that_they_stand_for(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, when the expected outputs are computed
        outcome = follow(node_cases(), tmp_path)
    expect(outcome, 1000)
    assert outcome.refused == NOT_TENSORS
    assert outcome.rejected == REJECTED


@pytest.mark.one_case
@pytest.mark.parametrize(("kind", "at_least"), [("simple", 10), ("pytorch-converted", 50), ("pytorch-operator", 20)])
def test_small_models(kind: str, at_least: int, tmp_path: Path) -> None:
    outcome = follow(stored_cases(kind), tmp_path)
    expect(outcome, at_least)
    assert not outcome.refused | outcome.rejected


@pytest.mark.long
def test_image_models(tmp_path: Path) -> None:
    outcome = follow(light_cases(), tmp_path)
    expect(outcome, 9)
    assert not outcome.refused | outcome.rejected
