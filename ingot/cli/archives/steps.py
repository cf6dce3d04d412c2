"""Models with steps, and decoders, on the terminal: what their archives hold, and a command that asks them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

from ingot.model_store import Evidence, Generation
from ingot.model_store.format.evidence import StepsEvidence, TokensEvidence
from ingot.report.units import size
from ingot.steps import Steps
from ingot.steps.after.boxes import Boxes
from ingot.steps.after.classify import Classify
from ingot.steps.after.masks import Masks
from ingot.steps.after.segments import Segments
from ingot.steps.tokenize import Tokenize

# Texts of inputs in an example, by names; and files, by the first part of their media types.
_TEXTS = {"question": "Who wrote it?", "context": "Ada wrote it.", "text_pair": "another text"}
_FILES = {"image": ("picture.jpg", "image/jpeg"), "audio": ("sound.wav", "audio/wav")}


def described(steps: Steps, evidence: StepsEvidence | None) -> Iterator[tuple[str, str]]:
    """Yield the task, the raw interface, the steps and their proof, each as a title and a line."""
    yield "task", steps.task
    for spec in steps.inputs:
        yield "raw", f"{spec}{' (optional)' if spec.name in steps.optional else ''}"
    for spec in steps.outputs:
        yield "answer", str(spec)
    kinds = (*(step.kind for step in steps.before), "graph", *(step.kind for step in steps.after))
    yield "steps", " -> ".join(kinds)
    for step in steps.before:
        if isinstance(step, Tokenize):
            longer = "cut, and counted in cut_tokens" if step.overflow == "cut" else "refused"
            if step.stride is not None:
                longer = f"divided into rows that share {step.stride} tokens"
            yield "limit", f"{step.max_length} tokens with special tokens; longer texts are {longer}"
            if step.prompts:
                yield "prompts", f"{', '.join(step.prompts)}; default: {step.default_prompt or 'none'}"
    if steps.labels:
        yield "labels", _labels(steps)
    masks = any(isinstance(step, Masks | Segments) for step in steps.after)
    yield "proof", "none: the steps are as declared" if evidence is None else _proof(evidence, masks=masks)


def generating(generation: Generation | None, evidence: Evidence) -> Iterator[tuple[str, str]]:
    """Yield the cache, the texts and the proof of a decoder, each as a title and a line; nothing for other models."""
    if generation is None:
        return
    sizes = f"{generation.layers} layers x {generation.kv_heads} heads x {generation.head_size}"
    yield "cache", f"{sizes}, one buffer a slot; GroupQueryAttention, per-row lengths"
    yield "memory", f"{size(generation.cache_bytes)} a token, for texts of up to {generation.max_length:,} tokens"
    if generation.encoder is not None:
        yield "encoder", f"reads up to {generation.encoder.max_length:,} tokens once for each answer"
    template = "a chat template" if generation.chat_template else "no chat template"
    yield "texts", f"{generation.tokenizer or 'no tokenizer, so prompts are ids of tokens'}; {template}"
    yield "proof", "none" if evidence.tokens is None else _tokens(evidence.tokens)


def _tokens(evidence: TokensEvidence) -> str:
    equal = f"{evidence.tokens - len(evidence.ties):,} tokens equal to generate()'s"
    ties = f", {len(evidence.ties)} near ties" if evidence.ties else ""
    rows = f"{evidence.rows} rows at once equal to rows alone within {evidence.rows_error:.0e}"
    return f"{evidence.prompts} prompts, greedy: {equal}{ties}; nearest runner-up {evidence.gap:.1g} logits; {rows}"


def _labels(steps: Steps) -> str:
    labels = steps.labels
    by = next((f" by {step.function}" for step in steps.after if isinstance(step, Classify | Boxes)), "")
    return f"{len(labels)}{by}: {', '.join(labels[:5])}{', ...' if len(labels) > 5 else ''}"


def _proof(evidence: StepsEvidence, *, masks: bool) -> str:
    close = f"equal but for {evidence.error:.1e} of their pixels" if masks else f"within {evidence.error:.1e}"
    answers = f"answers of {evidence.answers} samples {close}" if evidence.answers else "answers are as declared"
    equal = f"within {evidence.deviation:.1e}" if evidence.deviation else "equal"
    tensors = f"tensors of {evidence.items} hard inputs are {equal}, " if evidence.items else ""
    return f"as {evidence.reference}: {tensors}{answers}"


def command(url: str, name: str, steps: Steps) -> str:
    """Return a command that asks a model by a file, which has to be there, or by texts; empty for both together.

    Args:
        url: the server's URL.
        name: the model's, as part of a path.
        steps: the model's steps.
    """
    media = {name: found for step in steps.before for name, found in step.media.items()}
    needed = [spec for spec in steps.inputs if spec.name not in steps.optional]
    if [spec.name for spec in needed] == [*media]:
        [found] = media.values()
        file, kind = _FILES.get(found.partition("/")[0], ("FILE", "application/octet-stream"))
        return f"curl -s {url}/models/{name} -H 'Content-Type: {kind}' --data-binary @{file}"
    if media:
        return ""
    texts = {**_TEXTS, "text": "The film was [MASK]."} if steps.task == "fill-mask" else _TEXTS
    tensors = [
        {"name": spec.name, "datatype": spec.dtype.value, "shape": [1], "data": [texts.get(spec.name, "some text")]}
        for spec in needed
    ]
    body = shlex.quote(json.dumps({"inputs": tensors}, separators=(",", ":")))
    return f"curl -s {url}/v2/models/{name}/infer -d {body}"
