"""Answers of a decoder without a server: of its goldens before it is ready, and of benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ingot.errors import InternalError
from ingot.model_store import Golden
from ingot.runtime.engines.decoder.options import DecoderOptions
from ingot.runtime.engines.decoder.step import Chosen
from ingot.runtime.generation.policy import Policy
from ingot.runtime.generation.requests import PROMPT, TOKENS, GenerationRequest
from ingot.runtime.generation.row import Row
from ingot.runtime.scheduling.limits import Limits
from ingot.tensors import Array

Run = Callable[[Mapping[str, Array]], dict[str, Array]]


def answers(run: Run, options: DecoderOptions, requests: Sequence[GenerationRequest]) -> list[list[int]]:
    """Return the tokens of each answer, without stop tokens; the requests share steps as they do in a server.

    Args:
        run: of a decoder's engine; no other caller may use it meanwhile.
        options: of the engine.
        requests: as many as wished.

    Raises:
        IngotError: a request is not valid, or a step fails.
    """
    policy = Policy(options, Limits(max_queue=len(requests) + 1))
    found: dict[Row, list[int]] = {policy.offer(request, 0): [] for request in requests}
    while (step := policy.plan()) is not None:
        for event in policy.finish(Chosen(**run(step.arrays))):
            found[event.row] += [] if event.token is None else [event.token.id]
    return [*found.values()]


def replay(run: Run, options: DecoderOptions, goldens: Sequence[Golden], model: str) -> None:
    """Check that greedy answers to the prompts of goldens are their tokens.

    Raises:
        InternalError: one is another; ``model`` is its name in the message.
    """
    fitting = [golden for golden in goldens if _fits(golden, options) and golden.outputs[TOKENS].size]
    more = options["rules"]["last"] is not None  # the last token of an answer is a forced one
    requests = [
        GenerationRequest(prompt=golden.inputs[PROMPT], max_tokens=golden.outputs[TOKENS].size + more)
        for golden in fitting
    ]
    for case, (golden, found) in enumerate(zip(fitting, answers(run, options, requests), strict=True)):
        expected = golden.outputs[TOKENS].tolist()
        if found[: len(expected)] != expected:
            place = next(i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1])
            raise InternalError(
                f"model '{model}' does not reproduce its golden tokens: token {place} of golden case {case} is "
                f"{found[place]}, and {expected[place]} is expected; the graph was changed since, or this machine "
                "computes something else, so the model is not served"
            )


def _fits(golden: Golden, options: DecoderOptions) -> bool:
    prompt, answer = golden.inputs[PROMPT].size, golden.outputs[TOKENS].size
    if options["source"]:
        return prompt <= options["source"] and len(options["start"]) + answer < options["context"]
    return prompt + answer <= options["context"]
