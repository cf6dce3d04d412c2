"""A decoder as the search sees it: a candidate reads texts token by token, as it writes answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ingot.errors import InvalidArgument, Unsupported
from ingot.model_store import Generation, Golden, Variant
from ingot.model_store.format.evidence import Agreement
from ingot.quant.data.samples import Samples
from ingot.quant.data.tokens import LENGTH, LIKELIEST, LOGPROBS, ROWS, SIGNATURE, TOKENS
from ingot.quant.graph.source import Source
from ingot.runtime import BaseEngine, EngineSpec
from ingot.runtime.engines.decoder.engine import DecoderEngine
from ingot.runtime.engines.decoder.options import options_of
from ingot.runtime.engines.decoder.sampling import logprobs_of
from ingot.runtime.generation.requests import PROMPT
from ingot.runtime.generation.requests import TOKENS as ANSWER
from ingot.runtime.settings.settings import Settings
from ingot.tensors import Array, Signature, arrays

# Texts by which rows at once are compared with a row alone, and tokens of each.
_ROWS, _LENGTH = 16, 8


class DecoderSource(Source):
    """A decoder, whose weights alone can be quantized.

    Ranges of activations per call would let the rows of a step influence each other, and fixed ones need inputs of the
    graph, which include its cache.
    """

    schemes = ("int8", "int4")
    engines = ("onnxruntime",)
    one_call = False

    def __init__(self, variant: Variant):
        if variant.serving.generation is not None and variant.serving.generation.encoder is not None:
            raise Unsupported(
                f"'{variant.serving.name}' is an encoder-decoder, whose weights are not quantized: serve it as it is"
            )
        super().__init__(variant)

    @property
    def signature(self) -> Signature:
        return SIGNATURE

    def open(self, spec: EngineSpec) -> Reader:
        return Reader(spec, self._generation)

    @property
    def _generation(self) -> Generation:
        if self.variant.serving.generation is None:
            raise InvalidArgument(f"'{self.variant.serving.name}' is not a decoder")
        return self.variant.serving.generation

    def timed(self, example: Mapping[str, Array]) -> Mapping[str, Array]:
        """Return the inputs of one step, whose time is that of the weights."""
        return {TOKENS: example[TOKENS][:, :1]}

    def agreement(
        self, expected: Sequence[Mapping[str, Array]], actual: Sequence[Mapping[str, Array]], samples: Samples
    ) -> tuple[Agreement, ...]:
        """Return how the probabilities agree; ``top1`` is the share of places with the same most likely token."""
        (found,) = super().agreement(expected, actual, samples)
        pairs = [(one[LIKELIEST], other[LIKELIEST]) for one, other in zip(expected, actual, strict=True)]
        equal = sum(int((one == other).sum()) for one, other in pairs) / sum(one.size for one, _ in pairs)
        return (found.model_copy(update={"top1": equal}),)

    def replayed(self, spec: EngineSpec) -> tuple[tuple[Golden, ...], tuple[str, ...]]:
        """Return the golden prompts with as many of their tokens as rounding changes on no machine, and a note.

        The margin of such a token is over twice as large as any change of a logit by the quantization itself.
        """
        cases = self.variant.goldens()
        original = EngineSpec(self.path, device="cpu", threads=spec.threads)
        with contextlib.closing(self.open(original)) as one, contextlib.closing(self.open(spec)) as other:
            found = [_shortened(case, one, other) for case in cases]
            apart = _apart(other, self._generation)
        note = (
            f"logits of rows at once differ from those of a row alone by up to {apart:.0e} of the largest, as "
            "activations are rounded to 8 bits: of two almost equally likely tokens, which one follows may depend on "
            "other requests"
        )
        return tuple(case for case in found if case.outputs[ANSWER].size), (note,)


class Reader(BaseEngine):
    """Reads texts; its inputs and outputs are :data:`~ingot.quant.data.tokens.SIGNATURE`.

    Args:
        spec: the graph.
        generation: its declaration.
    """

    signature = SIGNATURE
    platform = DecoderEngine.platform
    device = DecoderEngine.device

    def __init__(self, spec: EngineSpec, generation: Generation):
        options = options_of(generation, Settings(slots=ROWS, context=min(LENGTH, generation.max_length)))
        self._engine = DecoderEngine(spec.path, options, device="cpu", threads=spec.threads)

    @property
    def settings(self) -> Mapping[str, str]:
        return self._engine.settings

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        tokens = inputs[TOKENS]
        rows, length = tokens.shape
        likeliest, logprobs = np.empty((rows, length - 1), np.int64), np.empty((rows, length - 1), np.float32)
        for place, logits in enumerate(self._steps(tokens)):
            if place < length - 1:
                likeliest[:, place] = logits.argmax(axis=1)
                logprobs[:, place] = logprobs_of(logits, tokens[:, place + 1], 0)["logprobs"]
        return {LIKELIEST: likeliest, LOGPROBS: logprobs}

    def logits(self, tokens: Array) -> Array:
        """Return the logits behind each token of texts INT64[rows, length], FP32[rows, length, vocab]."""
        return np.stack([logits.copy() for logits in self._steps(tokens)], axis=1)

    def _steps(self, tokens: Array) -> Iterator[Array]:
        """Yield the logits behind each place of texts, FP32[rows, vocab], until the next one."""
        for place, column in enumerate(tokens.T):
            yield self._engine.extend(column, np.full(len(column), place))

    def terminate(self) -> None:
        self._engine.terminate()

    def close(self) -> None:
        self._engine.close()


def _shortened(case: Golden, original: Reader, quantized: Reader) -> Golden:
    prompt, answer = case.inputs[PROMPT], case.outputs[ANSWER]
    text = np.concatenate([prompt, answer])[:LENGTH]
    before, after = (reader.logits(text[None])[0, prompt.size - 1 : -1] for reader in (original, quantized))
    best = np.partition(after, -2, axis=1)[:, -2:]
    clear = best[:, 1] - best[:, 0] > 2 * np.abs(after - before).max(axis=1)
    kept = np.append(clear & (after.argmax(axis=1) == answer[: len(after)]), False)
    return replace(case, outputs={ANSWER: answer[: int(kept.argmin())]})


def _apart(reader: Reader, generation: Generation) -> float:
    """Return by how much rows at once depart from a row alone, relative to the largest logit."""
    tokens = np.random.default_rng(0).integers(0, generation.vocab, (_ROWS, min(_LENGTH, generation.max_length)))
    return max(arrays.departure(reader.logits(tokens[:1]), reader.logits(tokens[:rows])[:1]) for rows in (2, _ROWS))
