"""A decoder's graph run on rows of a cache, given the tokens that the original chose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ingot.export.program import Runner
from ingot.model_store import Generation
from ingot.tensors import Array, arrays


@dataclass(frozen=True)
class Answer:
    """Tokens [n] that follow a prompt, or that a decoder makes of it, and the logits [n, vocab] of each choice.

    ``scores`` are the logits to which the model's rules have been applied; None without rules.
    """

    prompt: Array
    tokens: Array
    logits: Array
    scores: Array | None = None

    @property
    def gaps(self) -> Array:
        """The difference between the logits of each token and of the next best one, [n]."""
        best = np.partition(self.logits if self.scores is None else self.scores, -2, axis=1)[:, -2:]
        gaps: Array = best[:, 1] - best[:, 0]
        return gaps

    @property
    def scale(self) -> float:
        """The largest magnitude of a logit."""
        return max(float(np.abs(self.logits).max()), arrays.SCALE_FLOOR)


class Rows:
    """Runs a graph on rows, each with its own cache, given the tokens that the original chose.

    Args:
        run: the graph.
        encoder: that of the encoder, if there is one.
        generation: its declaration.
        capacity: tokens of a row.
    """

    def __init__(self, run: Runner, encoder: Runner | None, generation: Generation, capacity: int):
        self._run, self._encoder, self._generation, self._capacity = run, encoder, generation, capacity

    def _prompt_of(self, answer: Answer) -> Array:
        """Return the tokens before an answer in its row."""
        encoder = self._generation.encoder
        return answer.prompt if encoder is None else np.array(encoder.start, np.int64)

    def _sources(self, answers: Sequence[Answer]) -> dict[str, Array]:
        """Return the inputs that an encoder makes of each row."""
        signature = self._generation.encoder_signature
        if self._encoder is None or signature is None:
            return {}
        [spec] = signature.inputs
        found = [self._encoder.run({spec.name: answer.prompt[None]}) for answer in answers]
        lengths = [next(iter(each.values())).shape[2] for each in found]
        inputs: dict[str, Array] = {
            "sources": np.array(lengths, np.int32) - 1,
            "source_total": np.array([max(lengths)], np.int32),
        }
        for name in found[0]:
            shape = (len(found), *found[0][name].shape[1:2], max(lengths), found[0][name].shape[3])
            inputs[name] = np.zeros(shape, np.float32)
            for row, (each, length) in enumerate(zip(found, lengths, strict=True)):
                inputs[name][row, :, :length] = each[name][0]
        return inputs

    def alone(self, answer: Answer, parts: int) -> Array:
        """Return the logits of each token of an answer, with the prompt in several parts: float32[n, vocab]."""
        logits, cache = self._prompt(answer, parts)
        found = [logits]
        for index, token in enumerate(answer.tokens[:-1]):
            logits, cache = self._step(token[None, None], [len(self._prompt_of(answer)) + index], cache)
            found.append(logits)
        return np.concatenate(found)

    def together(self, answers: Sequence[Answer]) -> list[Array]:
        """Return the same of several answers whose rows run at once, each at its own length.

        The prompts are read in one call, padded. Each row then continues with the last token of its prompt, as in
        servers.
        """
        prompts = [self._prompt_of(answer) for answer in answers]
        cache = self._prompts(prompts, self._sources(answers))
        found: list[list[Array]] = [[] for _ in answers]
        for index in range(max(len(answer.tokens) for answer in answers)):
            steps = [min(index, len(answer.tokens) - 1) for answer in answers]
            rows = [*zip(prompts, answers, steps, strict=True)]
            tokens = [[prompt[-1], *answer.tokens][step] for prompt, answer, step in rows]
            lengths = [len(prompt) - 1 + step for prompt, _, step in rows]
            logits, cache = self._step(np.array(tokens)[:, None], lengths, cache)
            for row, own in enumerate(found):
                own.append(logits[row : row + 1])
        return [np.concatenate(own[: len(answer.tokens)]) for own, answer in zip(found, answers, strict=True)]

    def _cache(self, rows: int) -> dict[str, Array]:
        declared = self._generation
        shape = (rows, declared.kv_heads, self._capacity, declared.head_size)
        return {spec.name: np.zeros(shape, np.float32) for spec in declared.caches}

    def _prompts(self, prompts: Sequence[Array], sources: dict[str, Array]) -> dict[str, Array]:
        """Return the cache behind prompts that are read in one call, padded on the right."""
        lengths = [len(prompt) for prompt in prompts]
        ids = np.stack([np.pad(prompt, (0, max(lengths) - len(prompt))) for prompt in prompts])
        return self._step(ids, [0] * len(prompts), {**self._cache(len(prompts)), **sources}, lengths)[1]

    def _prompt(self, answer: Answer, parts: int) -> tuple[Array, dict[str, Array]]:
        cache, start, prompt = {**self._cache(1), **self._sources([answer])}, 0, self._prompt_of(answer)
        for part in np.array_split(prompt, min(parts, len(prompt))):
            logits, cache = self._step(part[None], [start], cache)
            start += len(part)
        return logits, cache

    def _step(
        self, ids: Array, starts: Sequence[int], cache: dict[str, Array], ends: Sequence[int] | None = None
    ) -> tuple[Array, dict[str, Array]]:
        """Return logits [rows, vocab] and the cache after new tokens ``ids`` [rows, new] at the places ``starts``.

        Rows end at ``ends``; the tokens behind are padding.
        """
        positions = np.array(starts)[:, None] + np.arange(ids.shape[1])
        lengths = positions[:, -1].astype(np.int32) if ends is None else np.array(ends, np.int32) - 1
        inputs = {
            "input_ids": ids,
            "position_ids": positions,
            "lengths": lengths,
            "total": positions[:, -1].max(keepdims=True).astype(np.int32) + 1,
        }
        found = self._run.run({**inputs, **cache})
        return found["logits"], {
            name: found.get(name.replace("past_key_values", "present"), array) for name, array in cache.items()
        }
