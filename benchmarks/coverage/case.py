"""One model of the coverage run: its constructor, its inputs, and its dynamic dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from ingot.tensors import Range, TensorSpec, parse_spec, symbols

Sizes = Mapping[str, int]
Tensors = dict[str, torch.Tensor]
Fill = Callable[[tuple[int, ...], Sizes, torch.Generator], torch.Tensor]
"""Makes the values of one input from its shape, the sizes of all named dimensions and a seeded generator."""

# Size of the example, then the three unseen ones that are judged; a case overrides them for its own dimensions.
SIZES = {
    "batch": (2, 1, 3, 5),
    "seq": (7, 12, 5, 17),
    "target": (6, 9, 4, 13),
    "height": (48, 64, 40, 81),
    "width": (64, 48, 72, 56),
    "samples": (1600, 2000, 1203, 3001),
    "frames": (48, 64, 33, 81),
}
VOCABULARY = 99


@dataclass(frozen=True)
class Case:
    """A model and the export that is requested of it.

    Attributes:
        inputs: as in ``export_model``, in the order of ``forward``; a dotted name is a path into nested arguments,
            a number in it an index of a tuple.
        fills: how values are made, by input name or its last part; floats are otherwise normally distributed.
        constants: keyword arguments of ``forward`` that are not tensors.
        sizes: for named dimensions of this model only: the example's size, and three unseen ones.
        stateful: whether it changes its buffers when it runs.
    """

    name: str
    family: str
    build: Callable[[], nn.Module]
    inputs: tuple[str, ...]
    fills: Mapping[str, Fill] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    stateful: bool = False

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(parse_spec(text)[0] for text in self.inputs)

    @property
    def ranges(self) -> dict[str, Range]:
        """The bounds of every named dimension."""
        stated = {symbol: bounds for text in self.inputs for symbol, bounds in parse_spec(text)[1].items()}
        return {symbol: stated.get(symbol, Range()) for symbol in symbols(self.specs)}

    @property
    def example_sizes(self) -> Sizes:
        return self._sizes(0)

    @property
    def unseen_sizes(self) -> tuple[Sizes, ...]:
        return tuple(self._sizes(index) for index in (1, 2, 3))

    def _sizes(self, index: int) -> Sizes:
        known = {**SIZES, **self.sizes}
        return {symbol: known[symbol][index] for symbol in symbols(self.specs)}

    def module(self) -> nn.Module:
        """Return the model in evaluation mode, always with the same weights."""
        torch.manual_seed(0)
        module = self.build().eval()
        _roughen(module)
        norms = [part for part in module.modules() if isinstance(part, _BatchNorm)]
        if norms:
            self._calibrate(module, norms)
        return module

    def _calibrate(self, module: nn.Module, norms: Sequence[_BatchNorm]) -> None:
        """Set the statistics of batch norms by a run, so that activations keep their scale through the layers."""
        for part in norms:
            part.train()
            part.momentum = 1.0
        with torch.no_grad():
            module(**nest(self.make(self.unseen_sizes[-1], 0)), **self.constants)
        module.eval()

    def make(self, sizes: Sizes, seed: int) -> Tensors:
        """Return inputs by their flat names."""
        generator = torch.Generator().manual_seed(seed)
        made = {}
        for spec in self.specs:
            shape = tuple(dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape)
            dtype = getattr(torch, spec.dtype.torch_name)
            made[spec.name] = self._fill(spec)(shape, sizes, generator).to(dtype)
        return made

    def _fill(self, spec: TensorSpec) -> Fill:
        fills = {**FILLS, **self.fills}
        last = spec.name.rpartition(".")[2]
        default = None if spec.dtype.is_integer else normal
        found = fills.get(spec.name, fills.get(last, default))
        if found is None:
            raise KeyError(f"{self.name}: nothing says what values the input '{spec.name}' takes")
        return found


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return keyword arguments from values by dotted names: ``past.0.1`` is the second item of the first tuple."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        *path, last = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return {name: _tuples(value) for name, value in tree.items()}


def _tuples(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    children = {key: _tuples(value) for key, value in node.items()}
    return tuple(children.values()) if all(key.isdecimal() for key in children) else children


def leaves(outputs: Any) -> list[torch.Tensor]:
    """Return the tensors of a model's output in order."""
    return [leaf for leaf in pytree.tree_leaves(outputs) if torch.is_tensor(leaf)]


def _roughen(module: nn.Module) -> None:
    """Add noise to weights and biases: with the zeros and ones of a fresh model, many errors would not show."""
    generator = torch.Generator().manual_seed(1)
    codebooks = [buffer for name, buffer in module.named_buffers() if name.endswith("codebook.embed")]
    with torch.no_grad():
        for tensor in (*module.parameters(), *codebooks):
            if tensor.is_floating_point() and not is_lazy(tensor):
                share = tensor[0].numel() ** -0.5 if tensor.ndim > 1 and tensor.numel() else 0.1
                tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=min(share, 1.0))


def normal(shape: tuple[int, ...], sizes: Sizes, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator)


def integers(low: int, high: int) -> Fill:
    """Integers from ``low`` to below ``high``."""
    return lambda shape, sizes, generator: torch.randint(low, high, shape, generator=generator)


def below(symbol: str) -> Fill:
    """Indices into a named dimension."""
    return lambda shape, sizes, generator: torch.randint(sizes[symbol], shape, generator=generator)


def uniform(low: float, high: float) -> Fill:
    """Floats between two bounds."""
    return lambda shape, sizes, generator: torch.rand(shape, generator=generator) * (high - low) + low


def padding_mask(shape: tuple[int, ...], sizes: Sizes, generator: torch.Generator) -> torch.Tensor:
    """Return ones, then up to three zeros in each row but the first, which is full.

    More zeros than a window of local attention is wide would leave positions that attend to nothing. Their values have
    no meaning, differ between PyTorch's own kernels, and every user discards them.
    """
    lengths = shape[-1] - torch.randint(min(4, shape[-1]), (shape[0], 1), generator=generator)
    lengths[0] = shape[-1]
    return torch.arange(shape[-1]) < lengths


def lengths_of(symbol: str) -> Fill:
    """Lengths from 1 to a named dimension; the first is all of it."""

    def fill(shape: tuple[int, ...], sizes: Sizes, generator: torch.Generator) -> torch.Tensor:
        lengths = torch.randint(1, sizes[symbol] + 1, shape, generator=generator)
        lengths[0] = sizes[symbol]
        return lengths

    return fill


FILLS: dict[str, Fill] = {
    # Above the special tokens: padding, and those that classification heads search for.
    "input_ids": integers(5, VOCABULARY),
    "decoder_input_ids": integers(5, VOCABULARY),
    "token_type_ids": integers(0, 2),
    "attention_mask": padding_mask,
}
