"""A small decoder, built by hand: its graph in the form of an archive, and the same in numpy, one prompt at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from onnx import helper, numpy_helper

from ingot.model_store import Generation, Golden
from ingot.runtime.engines.decoder.options import DecoderOptions, options_of
from ingot.runtime.settings.settings import Settings
from ingot.tensors import Array
from tests import onnx_models
from tests.archives import archive_of

LAYERS, HEADS, KV_HEADS, SIZE, VOCAB, POSITIONS = 2, 4, 2, 8, 96, 128
GENERATION = Generation(layers=LAYERS, kv_heads=KV_HEADS, head_size=SIZE, max_length=POSITIONS, vocab=VOCAB, eos=(1,))
_WIDTH = HEADS * SIZE
_FLOAT, _INT64, _INT32 = 1, 7, 6


@cache
def weights() -> dict[str, Array]:
    """The weights; those of the logits are large, so that the most likely token is so by far."""
    random = np.random.default_rng(0)

    def drawn(*shape: int) -> Array:
        return random.standard_normal(shape).astype(np.float32) / np.float32(np.sqrt(shape[0]))

    found = {
        "table": drawn(VOCAB, _WIDTH) * 10,
        "places": drawn(POSITIONS, _WIDTH) * 10,
        "head": drawn(_WIDTH, VOCAB) * 8,
    }
    for layer in range(LAYERS):
        sizes = {"q": _WIDTH, "k": KV_HEADS * SIZE, "v": KV_HEADS * SIZE, "o": _WIDTH}
        found |= {f"{name}{layer}": drawn(_WIDTH, size) for name, size in sizes.items()}
    return found


def options(slots: int = 4, context: int | None = None) -> DecoderOptions:
    return options_of(GENERATION, Settings(slots=slots, context=context))


def save(folder: Path) -> Path:
    """Write the graph, ``decoder.onnx``."""
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["embedded"]),
        helper.make_node("Gather", ["places", "position_ids"], ["placed"]),
        helper.make_node("Add", ["embedded", "placed"], ["x0"]),
    ]
    for layer in range(LAYERS):
        nodes += _layer(layer)
    nodes += [
        helper.make_node("Gather", [f"x{LAYERS}", "last"], ["end"], axis=1),
        helper.make_node("MatMul", ["end", "head"], ["logits"]),
    ]
    constants = [numpy_helper.from_array(array, name) for name, array in weights().items()]
    constants.append(numpy_helper.from_array(np.array(-1), "last"))
    kinds = {"INT64": _INT64, "INT32": _INT32, "FP32": _FLOAT}
    signature = GENERATION.signature
    inputs, outputs = (
        [(spec.name, kinds[spec.dtype.value], spec.shape) for spec in side]
        for side in (signature.inputs, signature.outputs)
    )
    return onnx_models.save(folder / "decoder.onnx", nodes, inputs, outputs, constants)


def _layer(layer: int) -> list[Any]:
    """y = x + o(attention(q(x), k(x), v(x)))."""
    past = [f"past_key_values.{layer}.{part}" for part in ("key", "value")]
    present = [f"present.{layer}.{part}" for part in ("key", "value")]
    given = [*(f"{name}_{layer}" for name in "qkv"), *past, "lengths", "total"]
    attention = helper.make_node(
        "GroupQueryAttention",
        given,
        [f"a{layer}", *present],
        domain="com.microsoft",
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
    )
    return [
        *(helper.make_node("MatMul", [f"x{layer}", f"{name}{layer}"], [f"{name}_{layer}"]) for name in "qkv"),
        attention,
        helper.make_node("MatMul", [f"a{layer}", f"o{layer}"], [f"b{layer}"]),
        helper.make_node("Add", [f"x{layer}", f"b{layer}"], [f"x{layer + 1}"]),
    ]


def logits(tokens: Sequence[int]) -> Array:
    """Return the logits behind some tokens, FP32[vocab], without a cache."""
    found = weights()
    x = found["table"][list(tokens)] + found["places"][: len(tokens)]
    mask = np.triu(np.full((len(tokens), len(tokens)), -np.inf, np.float32), 1)
    for layer in range(LAYERS):
        q, k, v = ((x @ found[f"{name}{layer}"]).reshape(len(tokens), -1, SIZE).transpose(1, 0, 2) for name in "qkv")
        k, v = (each.repeat(HEADS // KV_HEADS, axis=0) for each in (k, v))
        scores = q @ k.transpose(0, 2, 1) / np.float32(np.sqrt(SIZE)) + mask
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        x = x + (shares @ v).transpose(1, 0, 2).reshape(len(tokens), -1) @ found[f"o{layer}"]
    result: Array = x[-1] @ found["head"]
    return result


def greedy(prompt: Sequence[int], count: int, stop: Sequence[int] = ()) -> list[int]:
    """Return the most likely tokens behind a prompt, up to a stop token."""
    tokens = list(prompt)
    for _ in range(count):
        token = int(logits(tokens).argmax())
        if token in stop:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def archive(
    folder: Path, name: str = "decoder", generation: Generation = GENERATION, files: Mapping[str, bytes] | None = None
) -> Path:
    """Write an archive of the decoder, with a golden case; ``files`` are those of its texts."""
    prompt = np.array([5, 6, 7])
    golden = Golden({"prompt": prompt}, {"tokens": np.array(greedy(prompt.tolist(), 8))})
    path, graph = folder / f"{name}.ingot", save(folder).read_bytes()
    archive_of(name, graph, generation.signature, [golden], files, generation=generation).save(path)
    return path
