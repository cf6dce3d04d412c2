"""One ONNX graph for prompts and single tokens of a decoder."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir.passes.common import DeduplicateInitializersPass
from torch import Tensor, nn

from ingot import foreign
from ingot.errors import ExportError, Unsupported
from ingot.export.capture import exported
from ingot.export.decoder.attention import HEAD_STEP, OPERATOR, Shape, Slots, Source, attending, slots
from ingot.export.decoder.encoders import CrossDecoder, Encoder, is_encoder_decoder, layers_of
from ingot.export.lower import onnx as lower_onnx
from ingot.export.lower.forms.translations import TRANSLATIONS
from ingot.export.program import Program, quiet
from ingot.model_store import Generation
from ingot.tensors import Signature

# Sizes of the traced example: torch takes 0 and 1, and equal sizes, for constants.
_SIZES = {"rows": 2, "new": 3, "capacity": 7, "source": 5, "source_capacity": 6}
# Rotary embeddings whose factors depend on the length: the graph has those of lengths up to the original one.
_BY_LENGTH = ("dynamic", "longrope")
_GRAPH_ALONE = "export its graph without a cache (--task none)"


class Decoder(nn.Module):
    """A decoder as a function of flat tensors, in the order of the graph's inputs.

    Args:
        model: a causal language model of transformers, in evaluation mode.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.model = model
        known = inspect.signature(model.forward).parameters
        if "position_ids" not in known:
            raise Unsupported("its positions are not an input")
        # Transformers 5 renamed the cache.
        self._cache = "cache" if "cache" in known else "past_key_values"
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in known else {}

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the logits of the last token, [rows, vocab], and the cache of each layer."""
        input_ids, position_ids, lengths, total, *past = tensors
        opened = Slots(past, lengths, total)
        return (self.logits(input_ids, position_ids, opened), *opened.present)

    def logits(self, input_ids: Tensor, position_ids: Tensor, opened: Slots) -> Tensor:
        with slots(opened):
            given = {self._cache: opened, **self._last}
            found = self.model(input_ids=input_ids, position_ids=position_ids, use_cache=True, **given)
        logits: Tensor = found.logits[:, -1]
        return logits


def shapes(model: Any) -> tuple[list[Shape], int]:
    """Return the cache of each layer of a model, and the number of its logits.

    Raises:
        Unsupported: the model is not of the form that the graph needs; the message names the reason and the remedy.
    """
    one = torch.ones((1, 2), dtype=torch.int64)
    length, total = torch.ones(1, dtype=torch.int32), torch.full((1,), 2, dtype=torch.int32)
    with _named(model), quiet(), torch.no_grad():
        made = Encoder(model)(one) if is_encoder_decoder(model) else None
        opened = Slots(None, length, total, None if made is None else Source(made, length, total))
        with attending(model):
            decoder = Decoder(model) if made is None else CrossDecoder(model)
            logits = decoder.logits(one, one.cumsum(1) - 1, opened)
        _check(opened.shapes, model)
    return [opened.shapes[layer] for layer in sorted(opened.shapes)], logits.shape[-1]


def _check(found: dict[int, Shape], model: Any) -> None:
    config = model.config.get_text_config(decoder=True)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise Unsupported("its layers attend to chunks of a text, which the operator does not")
    if getattr(config, "attention_type", None) == "block_sparse":
        raise Unsupported("its encoder attends to long texts in another way than to short ones (block_sparse)")
    layers = len(layers_of(model)) if is_encoder_decoder(model) else config.num_hidden_layers
    if sorted(found) != list(range(layers)):
        raise Unsupported(f"{len(found)} of its {layers} layers have attention over a cache, and others a state")
    sizes = sorted({(shape.kv_heads, shape.head_size) for shape in found.values()})
    if len(sizes) > 1:
        shown = " and ".join(f"{heads} heads of {size}" for heads, size in sizes)
        raise Unsupported(f"its layers have caches of several sizes: {shown}")
    if sizes[0][1] % HEAD_STEP:
        raise Unsupported(f"its heads have {sizes[0][1]} elements, which is not a multiple of {HEAD_STEP}")


@contextlib.contextmanager
def _named(model: Any) -> Iterator[None]:
    """Name the model in errors, and the remedy."""
    name = type(model).__name__

    def unsuitable(error: Exception) -> str:
        reason = foreign.one_line(error)
        if isinstance(error, AttributeError) and isinstance(error.obj, Slots):
            reason = f"its layers keep a state besides keys and values ({error.name})"
        return f"{name} cannot be exported as a decoder with a cache: {reason}; {_GRAPH_ALONE}"

    with foreign.reported_as(Unsupported, unsuitable):
        yield


def make(model: Any, generation: Generation) -> ir.Model:
    """Return the ONNX graph of a decoder.

    Args:
        model: a causal language model of transformers, or an encoder-decoder.
        generation: its declaration.

    Raises:
        ExportError: the model cannot be captured, or an operator has no ONNX form.
    """
    with attending(model), _flat_head(model), _short_rotary(model):
        decoder = Decoder(model) if generation.encoder is None else CrossDecoder(model)
        made = _captured(model, decoder, generation.signature)
    own = (node for node in made.graph if node.op_type == OPERATOR and len(node.outputs) > 1)
    for layer, node in enumerate(own):
        node.name = f"attention.{layer}"
    return made


def make_encoder(model: Any, generation: Generation) -> ir.Model | None:
    """Return the ONNX graph of a model's encoder, None without one; errors as for :func:`make`."""
    signature = generation.encoder_signature
    return None if signature is None else _captured(model, Encoder(model), signature)


def _captured(model: Any, part: nn.Module, signature: Signature) -> ir.Model:
    def uncaptured(error: Exception) -> str:
        return f"{type(model).__name__} cannot be captured with a cache: {foreign.one_line(error)}; {_GRAPH_ALONE}"

    example = tuple(
        torch.zeros(
            [_SIZES[dim] if isinstance(dim, str) else dim for dim in spec.shape],
            dtype=getattr(torch, spec.dtype.torch_name),
        )
        for spec in signature.inputs
    )
    with foreign.reported_as(ExportError, uncaptured):
        traced = exported.trace(part, signature.inputs, {}, example)
    with quiet(), foreign.reported_as(ExportError, uncaptured):  # by name: its cause is in code of transformers
        graph = lower_onnx.lower(Program(traced, signature), None, TRANSLATIONS)
    DeduplicateInitializersPass(size_limit=1 << 62)(graph)
    for value in [*graph.graph.initializers.values()]:
        value.name = (value.name or "").removeprefix("model.")  # the decoder's own name for the user's module
    return graph


def rotary_by_length(part: Any) -> bool:
    """Return whether a module has rotary factors that depend on the length of a text."""
    kind = getattr(part, "rope_type", "")
    return isinstance(kind, str) and kind in _BY_LENGTH


@contextlib.contextmanager
def _short_rotary(model: Any) -> Iterator[None]:
    """Keep the rotary factors of short texts, whatever the positions are."""
    parts = {part: part.rope_type for part in model.modules() if rotary_by_length(part)}
    try:
        for part in parts:
            part.rope_type = "default"
        yield
    finally:
        for part, kind in parts.items():
            part.rope_type = kind


@contextlib.contextmanager
def _flat_head(model: Any) -> Iterator[None]:
    """Let the output layer read [rows, hidden], which lowers to Gemm, instead of [rows, new, hidden].

    Gemm reads the weights as they are stored, so tied embeddings stay one tensor of the graph. MatMul would transpose
    them.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        yield
        return
    handles = (
        head.register_forward_pre_hook(lambda module, inputs: (inputs[0][:, -1],)),
        head.register_forward_hook(lambda module, inputs, output: output[:, None]),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
