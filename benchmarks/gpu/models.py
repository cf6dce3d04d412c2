"""The models: modules with random weights, their inputs, and archives of them as PyTorch programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ingot.model_store import Archive, BlobFolder, Golden, Provenance, Serving, Store, add_variant
from ingot.model_store.format import manifest
from ingot.model_store.format.partition import TorchHeader
from ingot.runtime.engines.pytorch.torch_arrays import from_torch, to_torch, torch_dtype
from ingot.runtime.engines.pytorch.torch_program import HEADER
from ingot.tensors import Array, DType, Range, Signature, TensorSpec


class Bottleneck(nn.Module):
    """A block of ResNet-50."""

    def __init__(self, before: int, width: int, stride: int):
        super().__init__()
        sizes = ((before, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.layers = nn.Sequential()
        for place, (into, out, kernel, step) in enumerate(sizes):
            self.layers.append(nn.Conv2d(into, out, kernel, step, kernel // 2, bias=False))
            self.layers.append(nn.BatchNorm2d(out))
            if place < 2:
                self.layers.append(nn.ReLU())
        self.short: nn.Module = nn.Identity()
        if stride > 1 or before != 4 * width:
            self.short = nn.Sequential(nn.Conv2d(before, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.layers(x) + self.short(x))


def residual(width: int, blocks: tuple[int, ...]) -> nn.Module:
    """Return a ResNet-50 of 1,000 classes if ``width`` is 64 and ``blocks`` are 3, 4, 6 and 3."""
    stem = (nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    layers, before = nn.Sequential(*stem), width
    for stage, count in enumerate(blocks):
        for block in range(count):
            layers.append(Bottleneck(before, width << stage, 2 if stage and not block else 1))
            before = 4 * (width << stage)
    return layers.append(nn.AdaptiveAvgPool2d(1)).append(nn.Flatten()).append(nn.Linear(before, 1000))


class Block(nn.Module):
    """Attention and two layers, as in BERT (normalized after) and decoders (before, causal)."""

    def __init__(self, width: int, heads: int, hidden: int, *, causal: bool):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.mixed, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.norms
        if self.causal:
            x = x + self.attention(first(x))
            x = x + self.layers(second(x))
        else:
            x = first(x + self.attention(x))
            x = second(x + self.layers(x))
        return x

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.mixed(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=self.causal)
        joined: torch.Tensor = self.joined(mixed.transpose(1, 2).flatten(2))
        return joined


class Transformer(nn.Module):
    """BERT, whose output is that of the first token, or a decoder, whose output is the scores after the last one."""

    def __init__(self, layers: int, width: int, heads: int, hidden: int, length: int, vocabulary: int, *, causal: bool):
        super().__init__()
        self.causal = causal
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads, hidden, causal=causal) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, vocabulary if causal else width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.blocks(self.words(x) + self.places))
        scores: torch.Tensor = self.out(hidden[:, -1] if self.causal else hidden[:, 0])
        return scores


@dataclass(frozen=True)
class Spec:
    """A model with one input ``x`` and one output ``y``.

    Attributes:
        build: makes the module.
        shape: of one sample.
        values: how many different integers the input has; 0 for floats.
        batches: sizes that are tried without a server, ascending; the server's largest batch is the last.
        limit: seconds in which 99 of 100 requests are to be answered; None without such a goal.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    values: int = 0
    batches: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    limit: float | None = None

    def module(self, dtype: torch.dtype) -> nn.Module:
        """Return the module with weights of a type, equal in every call."""
        torch.manual_seed(1)
        return self.build().eval().to(dtype)

    def sample(self, random: np.random.Generator, dtype: DType) -> Array:
        """Return a sample, with a batch dimension."""
        if self.values:
            return random.integers(0, self.values, (1, *self.shape))
        return random.standard_normal((1, *self.shape), np.float32).astype(dtype.numpy)


def specs(*, small: bool) -> dict[str, Spec]:
    """Return the models by name; ``small`` ones show that the benchmark works, and no more."""
    perceptron = nn.Sequential
    if small:
        tried = (1, 4)
        return {
            "mlp": Spec(lambda: perceptron(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), (8,), 0, tried),
            "resnet50": Spec(lambda: residual(4, (1, 1)), (3, 32, 32), 0, tried, 0.5),
            "bert": Spec(lambda: Transformer(1, 16, 2, 32, 8, 50, causal=False), (8,), 50, tried, 0.5),
            "decoder": Spec(lambda: Transformer(1, 16, 2, 32, 8, 50, causal=True), (8,), 50, (1, 2)),
        }
    return {
        "mlp": Spec(lambda: perceptron(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), (64,)),
        "resnet50": Spec(lambda: residual(64, (3, 4, 6, 3)), (3, 224, 224), limit=0.015),
        "bert": Spec(lambda: Transformer(12, 768, 12, 3072, 128, 30522, causal=False), (128,), 30522, limit=0.130),
        # 1.4 billion parameters in the blocks, and the words.
        "decoder": Spec(
            lambda: Transformer(28, 1536, 12, 13440, 512, 151936, causal=True), (512,), 151936, (1, 2, 4, 8, 16)
        ),
    }


def write_program(spec: Spec, path: Path, dtype: DType, *, most: int = 1024) -> tuple[Signature, Golden]:
    """Write a model as a PyTorch program for the engine of format ``pt2``; return its signature and an answer.

    Without the proof of ``ingot export``, which would take minutes for the largest model.
    """
    example = np.concatenate([spec.sample(np.random.default_rng(1), dtype) for _ in range(2)])
    module = spec.module(torch_dtype(dtype))
    given = TensorSpec("x", DType.of(example), ("batch", *spec.shape))
    with torch.no_grad():
        tensor = to_torch(given, example)
        answer = from_torch(module(tensor))
        sizes = {0: torch.export.Dim("batch", min=1, max=most)}
        program = torch.export.export(module, (tensor,), dynamic_shapes=(sizes,))
    returned = TensorSpec("y", DType.of(answer), ("batch", *answer.shape[1:]))
    signature = Signature((given,), (returned,), "batch", {"batch": Range(1, most)})
    header = TorchHeader(torch=torch.__version__.partition("+")[0], signature=signature)
    torch.export.save(program, path, extra_files={HEADER: manifest.encode(header).decode()})
    return signature, Golden({"x": example}, {"y": answer})


def store_of(name: str, spec: Spec, folder: Path, dtype: DType) -> Path:
    """Return a store with the model ``NAME:1`` as a PyTorch program; make it if it does not exist."""
    store = folder / "store"
    if store.exists():
        return store
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.pt2"
    signature, golden = write_program(spec, path, dtype)
    blobs = BlobFolder(folder / "blobs")
    with path.open("rb") as stream:
        graph = blobs.put(iter(lambda: stream.read(1 << 20), b""), manifest.WEIGHT, {manifest.FILEPATH: path.name})
    serving = Serving(
        name=name,
        variant=dtype.value.lower(),
        format="pt2",
        precision=dtype.value.lower(),
        signature=signature,
        golden_tolerance=0.1,  # kernels for bfloat16 round differently
        provenance=Provenance(source="benchmarks.gpu", created="2026-01-02T03:04:05Z"),
    )
    archive = Archive.create(blobs, [add_variant(blobs, serving, graph, [], [golden])])
    Store(store).push(archive, f"{name}:1")
    return store


def requests_of(spec: Spec, dtype: DType, count: int = 32) -> tuple[Mapping[str, Array], ...]:
    """Return requests of one sample."""
    random = np.random.default_rng(2)
    return tuple({"x": spec.sample(random, dtype)} for _ in range(count))
