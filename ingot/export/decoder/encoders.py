"""The two graphs of an encoder-decoder: the encoder, which runs once for each answer, and the decoder.

The encoder's graph returns its output as the keys and values to which each layer of the decoder attends.
Positions are an input of the graph: the module that embeds them, or the bias by relative position, is replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ingot.errors import Unsupported
from ingot.export import torch_internals
from ingot.export.decoder.attention import Slots, Source, slots


def is_encoder_decoder(model: Any) -> bool:
    """Return whether a model of transformers has an encoder, and a decoder that attends to its output."""
    return bool(getattr(model.config, "is_encoder_decoder", False))


class Encoder(nn.Module):
    """An encoder, and the keys and values of its output in each layer of the decoder.

    Args:
        model: an encoder-decoder of transformers, in evaluation mode.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.encoder = model.get_encoder()
        self.projections = nn.ModuleList(_projections(model))
        self._size = _heads(model)[1]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return keys and values of each layer in turn, [1, heads, source, head_size]."""
        [given] = tensors
        hidden = self.encoder(given).last_hidden_state
        found = (project(hidden).view(*hidden.shape[:2], -1, self._size) for project in self.projections)
        return tuple(each.transpose(1, 2) for each in found)


def _heads(model: Any) -> tuple[int, int]:
    """Return the heads of each layer of a decoder, and the elements of each."""
    config = model.config
    heads = getattr(config, "decoder_attention_heads", None) or config.num_heads
    return heads, getattr(config, "d_kv", None) or config.d_model // heads


def _projections(model: Any) -> Iterator[nn.Module]:
    """Yield the projections of an encoder's output to keys and values, of each layer of a decoder in turn."""
    for layer in layers_of(model):
        if (attention := getattr(layer, "encoder_attn", None)) is not None:
            yield from (attention.k_proj, attention.v_proj)
        elif hasattr(layer, "layer") and hasattr(layer.layer[1], "EncDecAttention"):
            yield from (layer.layer[1].EncDecAttention.k, layer.layer[1].EncDecAttention.v)
        else:
            raise Unsupported("its decoder attends to the encoder in a way that is not known")


class CrossDecoder(nn.Module):
    """The decoder of an encoder-decoder as a function of flat tensors, in the order of the graph's inputs.

    Args:
        model: an encoder-decoder of transformers, in evaluation mode.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the logits of the last token, [rows, vocab], and the cache of each layer."""
        input_ids, position_ids, lengths, total, *others = tensors
        count = 2 * len(layers_of(self.model))
        past, (sources, source_total, *made) = others[:count], others[count:]
        opened = Slots(past, lengths, total, Source(made, sources, source_total))
        return (self.logits(input_ids, position_ids, opened), *opened.present)

    def logits(self, input_ids: Tensor, position_ids: Tensor, opened: Slots) -> Tensor:
        from transformers.modeling_outputs import BaseModelOutput

        # Only whether there is an output matters: its keys and values are known.
        hidden = torch.zeros((input_ids.shape[0], 1, self.model.config.d_model))
        with slots(opened), _positioned(self.model.get_decoder(), position_ids, opened):
            found = self.model(
                encoder_outputs=BaseModelOutput(last_hidden_state=hidden),
                decoder_input_ids=input_ids,
                cache=_pair(opened, len(layers_of(self.model))),
                use_cache=True,
            )
        logits: Tensor = found.logits[:, -1]
        return logits


def layers_of(model: Any) -> Any:
    """Return the layers of the decoder."""
    decoder = model.get_decoder()
    return getattr(decoder, "block", None) or decoder.layers


def _pair(opened: Slots, layers: int) -> Any:
    """Return the two caches as decoders expect them, with the keys and values of the encoder's output."""
    from transformers import EncoderDecoderCache

    pair: Any = EncoderDecoderCache.__new__(EncoderDecoderCache)
    pair.self_attention_cache = opened
    pair.cross_attention_cache = opened.source
    pair.is_updated = dict.fromkeys(range(layers), True)
    return pair


@contextlib.contextmanager
def _positioned(decoder: Any, positions: Tensor, opened: Slots) -> Iterator[None]:
    """Let a decoder use these positions, INT64[rows, new], in the block."""
    with contextlib.ExitStack() as stack:
        replaced = 0
        for part in decoder.modules():
            if hasattr(part, "relative_attention_bias"):
                stack.enter_context(_replaced(part, "compute_bias", _bias(part, positions, opened.total)))
                replaced += 1
        if (table := getattr(decoder, "embed_positions", None)) is not None:
            if not isinstance(table, nn.Embedding):
                raise Unsupported("its positions are not rows of a table")
            embedded = nn.functional.embedding(positions + getattr(table, "offset", 0), table.weight)
            stack.enter_context(_replaced(table, "forward", lambda *args, **kwargs: embedded))
            replaced += 1
        if not replaced:
            raise Unsupported("the positions of its decoder are not known")
        yield


def _bias(part: Any, positions: Tensor, total: Tensor) -> Callable[..., Tensor]:
    """Return the bias of attention by the distances of keys, [rows, heads, new, total]."""

    def compute(*args: object, **kwargs: object) -> Tensor:
        count = total.max().item()
        keys = torch.arange(count)
        buckets = torch_internals.distance_buckets(part, keys - positions[:, :, None])
        found: Tensor = part.relative_attention_bias(buckets).permute(0, 3, 1, 2)
        return found

    return compute


@contextlib.contextmanager
def _replaced(part: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    setattr(part, name, function)
    try:
        yield
    finally:
        delattr(part, name)
