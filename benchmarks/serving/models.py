"""The models that are served: each as an ONNX file, as an archive of the same bytes, and with numbered samples."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

from benchmarks.serving import graphs
from ingot.model_store import Archive, BlobFolder, Golden, Provenance, Serving, Store, add_variant
from ingot.model_store.format import manifest
from ingot.tensors import Array, DType, Range, Signature, TensorSpec


@dataclass(frozen=True)
class Spec:
    """A model: its graph, and a generator of samples.

    Attributes:
        exact: whether an answer is the same to the bit in every batch.
        samples: how many numbered inputs there are.
        formats: the clients' formats; a picture as JSON would measure only the JSON.
    """

    name: str
    graph: Callable[[], onnx.ModelProto]
    draw: Callable[[np.random.Generator], dict[str, Array]]
    exact: bool
    samples: int
    formats: tuple[str, ...]


def _fractions(width: int, random: np.random.Generator) -> dict[str, Array]:
    return {"x": (random.integers(-2047, 2048, width) / 1024).astype(np.float32)}


def _sentence(random: np.random.Generator) -> dict[str, Array]:
    return {"input_ids": random.integers(0, 30522, 128), "attention_mask": np.ones(128, np.int64)}


def _picture(random: np.random.Generator) -> dict[str, Array]:
    return {"x": random.standard_normal((3, 224, 224), np.float32)}


SPECS = {
    spec.name: spec
    for spec in (
        Spec(
            "tiny",
            partial(graphs.perceptron, "tiny", (64, 128, 128, 10)),
            partial(_fractions, 64),
            exact=True,
            samples=64,
            formats=("json", "binary", "grpc"),
        ),
        Spec(
            "wide",
            partial(graphs.perceptron, "wide", (256, 3072, 3072, 3072, 10)),
            partial(_fractions, 256),
            exact=True,
            samples=64,
            formats=("json", "binary", "grpc"),
        ),
        Spec(
            "minilm",
            partial(graphs.transformer, "minilm", layers=6, width=384, heads=12, vocabulary=30522, length=128),
            _sentence,
            exact=False,
            samples=16,
            formats=("binary",),
        ),
        Spec(
            "cnn",
            partial(graphs.residual, "cnn", size=224, classes=1000),
            _picture,
            exact=False,
            samples=16,
            formats=("binary",),
        ),
    )
}


class Model:
    """A model that was made: open it with :func:`model`.

    ``path`` is the ONNX file; ``store`` holds the same bytes as the archive ``NAME:1``.
    """

    def __init__(self, spec: Spec, folder: Path):
        self.spec = spec
        self.name = spec.name
        self.path = folder / "model.onnx"
        self.store = folder / "store"
        self._folder = folder

    @property
    def source(self) -> list[str]:
        """The arguments of ``ingot serve`` that name it."""
        return [f"{self.name}:1", "--store", str(self.store)]

    @cached_property
    def samples(self) -> list[dict[str, Array]]:
        """The inputs by their numbers, without the batch dimension."""
        random = np.random.default_rng(1)
        return [self.spec.draw(random) for _ in range(self.spec.samples)]

    @cached_property
    def expected(self) -> Array:
        """What ONNX Runtime answers to each sample alone: [samples, width]."""
        loaded: Array = np.load(self._folder / "expected.npy")
        return loaded

    @cached_property
    def output(self) -> str:
        return str(self.session().get_outputs()[0].name)

    def session(self) -> onnxruntime.InferenceSession:
        """Load the model as every contestant does: one thread, otherwise default settings."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        return onnxruntime.InferenceSession(self.path, options, providers=["CPUExecutionProvider"])

    def right(self, answer: Array, number: int) -> bool:
        """Whether an answer is that to a sample: equal, or as near as another batch size may make it."""
        expected = self.expected[number]
        if answer.shape != expected.shape:
            return False
        return np.array_equal(answer, expected) if self.spec.exact else bool(self._distance(answer, number) < 1e-3)

    def _distance(self, answer: Array, number: int) -> float:
        return float(np.abs(answer - self.expected[number]).max() / np.abs(self.expected).max())

    def make(self) -> None:
        """Write all files.

        Raises:
            SystemExit: the answers to two samples are too similar to distinguish.
        """
        self._folder.mkdir(parents=True)
        onnx.save(self.spec.graph(), self.path)
        session = self.session()
        answers = [session.run(None, {k: v[None] for k, v in sample.items()})[0][0] for sample in self.samples]
        np.save(self._folder / "expected.npy", np.stack(answers))
        for number, answer in enumerate(answers):
            if [other for other in range(len(answers)) if self.right(answer, other)] != [number]:
                raise SystemExit(f"model {self.name}: the answer to sample {number} is not that sample's alone")
        Store(self.store).push(self._archive(session), f"{self.name}:1")
        shutil.rmtree(self._folder / "blobs")

    def _archive(self, session: onnxruntime.InferenceSession) -> Archive:
        blobs = BlobFolder(self._folder / "blobs")
        graph = blobs.put(self.path.read_bytes(), manifest.WEIGHT, {manifest.FILEPATH: "model.onnx"})
        inputs = {key: value[None] for key, value in self.samples[0].items()}
        outputs = {self.output: self.expected[:1]}
        serving = Serving(
            name=self.name,
            variant="fp32",
            format="onnx",
            precision="fp32",
            signature=Signature(_specs(inputs), _specs(outputs), "batch", {"batch": Range(1, 1024)}),
            provenance=Provenance(source="benchmarks.serving", created="2026-01-02T03:04:05Z"),
        )
        return Archive.create(blobs, [add_variant(blobs, serving, graph, [], [Golden(inputs, outputs)])])


def _specs(tensors: Mapping[str, Array]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, DType.of(array), ("batch", *array.shape[1:])) for name, array in tensors.items())


def model(name: str, build: Path) -> Model:
    """Return a model; make it if it does not exist.

    Args:
        name: one of :data:`SPECS`.
        build: the benchmark's folder for generated files.
    """
    folder = build / "models" / name
    found = Model(SPECS[name], folder)
    if not (folder / "store").exists():
        shutil.rmtree(folder, ignore_errors=True)
        found.make()
    return found
