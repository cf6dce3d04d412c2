"""The export of a decoder: from a folder of transformers to an archive that generates texts."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ingot import foreign
from ingot.errors import InvalidArgument, Unsupported
from ingot.export.decoder import declaration, graph, proof
from ingot.export.decoder.attention import Shape
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
from ingot.model_store.references import name_from, stored_name
from ingot.runtime.engines.decoder.options import options_of
from ingot.runtime.engines.loader import load_engine
from ingot.runtime.engines.spec import EngineSpec
from ingot.runtime.generation import offline
from ingot.runtime.generation.requests import GenerationRequest
from ingot.runtime.settings.settings import Settings

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
    progress: Progress = lambda step: None,
) -> Archive:
    """Put a causal language model of transformers into an archive, and prove that it generates the same tokens.

    The weights are float32. The graph has an explicit cache, in which each row has its own length.

    Args:
        folder: the model's, with ``config.json``, weights and, for texts, the files of a tokenizer.
        name: the archive's; by default the folder's.
        allow_code: run the Python code in the folder that ``auto_map`` in its ``config.json`` names.
        progress: called with the name of each step as it begins.

    Returns:
        An archive with the variant ``fp32``.

    Raises:
        NotFound: there is no model in the folder.
        InvalidArgument: it cannot be loaded.
        Unsupported: the model's attention is not of a form that the graph has; the message names it.
        ExportError: the model cannot be captured.
        ParityError: the graph computes other logits than the model, or the stored tokenizer other ids.
    """
    folder, journal, blobs = Path(folder), Journal(progress), BlobFolder.scratch()
    with journal.stage("read", "Loading the model"):
        source = _read(folder, journal, allow_code=allow_code)
    generation, files = source.generation, source.files
    with journal.stage("capture", "Capturing the graph with its cache"):
        model = graph.make(source.model, generation.signature)
    opset = str(model.opset_imports.get("", 0))
    journal.graphs.append(onnx_graphs.of_model("ONNX graph", model))
    with journal.stage("pack", "Storing the weights"):
        packed, weights = onnx_graph.pack(model, blobs)
    with journal.stage("generate", "Generating tokens with transformers"):
        answers = proof.generated(source.model, generation, source.shapes, source.tokenizer)
    del source, model  # their weights need as much memory as the engines
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
    documents = _documents(journal, serving, packed, weights)
    variant = add_variant(blobs, serving, packed, weights, proof.goldens(answers), documents, files)
    return Archive.create(blobs, [variant])


def _read(folder: Path, journal: Journal, *, allow_code: bool) -> _Source:
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
    with foreign.reported_as(InvalidArgument, f"the configuration in {folder} cannot be served"):
        generation = declaration.declare(model, shapes, vocab, tokenizer, journal.note)
    return _Source(model, tokenizer, shapes, generation, files)


def _proved(
    path: Path, generation: Generation, answers: Sequence[proof.Answer]
) -> tuple[ParityEvidence, TokensEvidence]:
    """Compare the logits of the graph, and the tokens of the engine that servers use, in which all prompts run at once.

    Raises:
        ParityError: they differ.
    """
    spec = EngineSpec(path, device="cpu")
    with contextlib.closing(load_engine(spec)) as engine:
        logits, apart = proof.measured(engine, generation, answers)
    longest = max(len(answer.prompt) + len(answer.tokens) for answer in answers)
    settings = Settings(slots=len(answers), context=min(longest + 1, generation.max_length))
    options = options_of(generation, settings)
    requests = [GenerationRequest(prompt=answer.prompt, max_tokens=len(answer.tokens)) for answer in answers]
    with contextlib.closing(load_engine(replace(spec, decoder=options))) as engine:
        served = offline.answers(engine.run, options, requests)
    return logits, proof.compared(answers, served, apart)


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
