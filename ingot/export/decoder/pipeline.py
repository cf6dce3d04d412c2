"""The export of a decoder: from the folder of a transformers model to an archive that generates texts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ingot import foreign
from ingot.errors import InvalidArgument, Unsupported
from ingot.export.decoder import declaration, graph, proof
from ingot.export.decoder.attention import Shape
from ingot.export.decoder.rows import Answer
from ingot.export.graphs import onnx as onnx_graphs
from ingot.export.report import Journal, Progress, page, view
from ingot.export.source.repositories import load_pretrained
from ingot.model_store import (
    Archive,
    BlobFolder,
    Evidence,
    Generation,
    ParityEvidence,
    Provenance,
    Serving,
    add_variant,
)
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.format import onnx_graph
from ingot.model_store.format.evidence import TokensEvidence
from ingot.model_store.format.manifest import FILEPATH
from ingot.model_store.references import name_from, stored_name
from ingot.runtime.engines.decoder.options import options_of
from ingot.runtime.engines.loader import load_engine
from ingot.runtime.engines.spec import EngineSpec
from ingot.runtime.generation import offline
from ingot.runtime.generation.requests import GenerationRequest
from ingot.runtime.settings.settings import Settings
from ingot.tasks import Generating

_PRECISION = "fp32"
_PACKAGES = ("torch", "transformers", "onnx-ir", "onnxscript")


@dataclass(frozen=True)
class _Source:
    """A model, its tokenizer and what is declared of both."""

    model: Any
    tokenizer: Any
    shapes: list[Shape]
    generation: Generation
    files: dict[str, bytes]


def export_decoder(
    folder: str | Path,
    *,
    name: str | None = None,
    allow_code: bool = False,
    task: Generating = "text-generation",
    greedy: bool = False,
    progress: Progress = lambda step: None,
) -> Archive:
    """Put a causal language model or an encoder-decoder of transformers into an archive, and prove its tokens.

    The weights are float32. The graph has an explicit cache, in which each row has its own length. An encoder is a
    second graph, which runs once for each answer.

    Args:
        folder: the model's, with ``config.json``, weights and, for texts, the files of a tokenizer.
        name: the archive's; by default the folder's.
        allow_code: run the Python code in the folder that ``auto_map`` in its ``config.json`` names.
        task: as Hugging Face names it.
        greedy: take the most likely tokens of an encoder-decoder whose ``generation_config`` has a beam search.
        progress: called with the name of each step as it begins.

    Returns:
        An archive with the variant ``fp32``.

    Raises:
        NotFound: there is no model in the folder.
        InvalidArgument: it cannot be loaded.
        Unsupported: the graph cannot express the model's attention, or servers cannot choose an encoder-decoder's
            tokens as its ``generation_config`` says; the message names the reason.
        ExportError: the model cannot be captured.
        ParityError: the graph computes other logits than the model, or the stored tokenizer other ids.
    """
    folder, journal, blobs = Path(folder), Journal(progress), BlobFolder.scratch()
    with journal.stage("read", "Loading the model"):
        source = _read(folder, journal, allow_code=allow_code, task=task, greedy=greedy)
    generation, files = source.generation, source.files
    with journal.stage("capture", "Capturing the graph with its cache"):
        model, encoder = graph.make(source.model, generation), graph.make_encoder(source.model, generation)
    opset = str(model.opset_imports.get("", 0))
    journal.graphs.append(onnx_graphs.of_model("ONNX graph", model))
    with journal.stage("pack", "Storing the weights"):
        packed, weights = onnx_graph.pack(model, blobs)
        if encoder is not None:
            generation, weights = _with_encoder(generation, weights, encoder, blobs)
    with journal.stage("generate", "Generating tokens with transformers"):
        answers = proof.generated(source.model, generation, source.shapes, source.tokenizer)
    del source, model, encoder  # their weights need as much memory as the engines
    with journal.stage("prove", "Comparing tokens with generate()") as stage:
        logits, tokens = _proved(blobs.path(packed), generation, answers)
        stage.detail, stage.parity = f"{tokens.tokens} tokens of {tokens.prompts} prompts are equal", (logits,)
    journal.note(*(f"near tie: {tie}" for tie in tokens.ties))
    serving = Serving(
        name=stored_name(name or name_from(folder.name)),
        variant=_PRECISION,
        format="onnx",
        precision=_PRECISION,
        signature=generation.signature,
        requires={"engine": "onnxruntime", "opset": opset},
        batchable=False,
        generation=generation,
        provenance=Provenance.of(str(folder), _PACKAGES, journal.notes),
        evidence=Evidence(parity=(logits,), tokens=tokens),
    )
    cases = proof.goldens(answers, forced=generation.rules.last is not None)
    documents = _documents(journal, serving, packed, weights)
    variant = add_variant(blobs, serving, packed, weights, cases, documents, files)
    return Archive.create(blobs, [variant])


def _with_encoder(
    generation: Generation, weights: tuple[Descriptor, ...], encoder: ir.Model, blobs: BlobFolder
) -> tuple[Generation, tuple[Descriptor, ...]]:
    """Store the graph of an encoder; return the declaration that names it, and all blobs but the decoder's graph."""
    packed, further = onnx_graph.pack(encoder, blobs)
    packed = packed.model_copy(update={"annotations": {FILEPATH: packed.hex}})
    named = None if generation.encoder is None else generation.encoder.model_copy(update={"blob": packed.hex})
    known = {each.digest: each for each in (*weights, packed, *further)}
    return generation.model_copy(update={"encoder": named}), (*known.values(),)


def _read(folder: Path, journal: Journal, *, allow_code: bool, task: Generating, greedy: bool) -> _Source:
    """Load a model and its tokenizer, and declare them."""
    model: Any = load_pretrained(folder, allow_code=allow_code)
    model = model.float().eval()
    shapes, vocab = graph.shapes(model)
    tokenizer, files = None, {}
    try:
        tokenizer = declaration.load_tokenizer(folder)
    except Unsupported as error:
        journal.note(f"prompts are ids of tokens: {error}")
    else:
        content, count = declaration.stored_tokenizer(tokenizer)
        files = {declaration.FILE: content}
        journal.note(f"the stored tokenizer has the same ids as the original for {count} hard texts")
    with foreign.reported_as(InvalidArgument, f"the configuration in {folder} cannot be served", keep=Unsupported):
        generation = declaration.declare(model, shapes, vocab, tokenizer, journal.note, task=task, greedy=greedy)
    return _Source(model, tokenizer, shapes, generation, files)


def _proved(path: Path, generation: Generation, answers: Sequence[Answer]) -> tuple[ParityEvidence, TokensEvidence]:
    """Compare the logits of the graph, and the tokens of the engine that servers use, in which all prompts run at once.

    Raises:
        ParityError: they differ.
    """
    spec = EngineSpec(path, device="cpu")
    with contextlib.ExitStack() as stack:
        engine, encoder = stack.enter_context(contextlib.closing(load_engine(spec))), None
        if generation.encoder is not None:
            found = load_engine(replace(spec, path=path.with_name(generation.encoder.blob)))
            encoder = stack.enter_context(contextlib.closing(found))
        logits, apart = proof.measured(engine, encoder, generation, answers)
    longest = max(len(answer.prompt) + len(answer.tokens) for answer in answers)
    most = max(len(answer.tokens) for answer in answers)
    settings = Settings(slots=len(answers), context=min(longest + most, generation.max_length))
    options = options_of(generation, settings)
    # As many tokens as generate() may make: the last one may be forced.
    requests = [GenerationRequest(prompt=answer.prompt, max_tokens=most) for answer in answers]
    with contextlib.closing(load_engine(replace(spec, decoder=options))) as engine:
        served = offline.answers(engine.run, options, requests)
    # No token ends these requests, so tokens may follow the end of the original's answer.
    cut = [tokens[: len(answer.tokens)] for tokens, answer in zip(served, answers, strict=True)]
    return logits, proof.compared(answers, cut, apart)


def _documents(
    journal: Journal, serving: Serving, packed: Descriptor, weights: tuple[Descriptor, ...]
) -> dict[str, bytes]:
    sizes = {"graph": packed.size, "weights": sum(item.size for item in weights)}
    report = journal.report(serving, sizes).bounded()
    return {
        "report.json": report.model_dump_json(indent=1).encode(),
        "report.html": page.html(report).encode(),
        "report.txt": view.text(report).encode(),
    }
