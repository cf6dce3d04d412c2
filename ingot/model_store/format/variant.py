"""One runnable form of a model: its manifest and content, and how to write one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ingot.bounds import bounds_of
from ingot.errors import InvalidArchive, InvalidArgument, Unsupported
from ingot.model_store.blobs.blobs import Blobs, read, read_document
from ingot.model_store.blobs.descriptor import Descriptor
from ingot.model_store.blobs.folder import BlobFolder
from ingot.model_store.format import goldens, manifest, onnx_wire
from ingot.model_store.format.evidence import BoundsEvidence, CallBytes
from ingot.model_store.format.goldens import Golden
from ingot.model_store.format.manifest import Manifest, ModelConfig, Serving
from ingot.model_store.format.partition import PartitionPlan, PythonPlan
from ingot.report.text import one_line
from ingot.steps import Apply, ItemStep, OpenedSteps, Values
from ingot.steps.completion.texts import CompletionTexts
from ingot.tensors import Array, Signature, check_inputs

_USUAL_BATCH, _USUAL_SIZE = 32, 128
_MAX_STEP_FILE = 1 << 30  # it is read into memory; weights of a dense layer are the largest
_MAX_GRAPH_BYTES = 1 << 31  # protobuf reads no larger messages


@dataclass(frozen=True)
class Variant:
    """One runnable form of a model.

    Examples:
        >>> variant = ingot.Archive.open("net.ingot").variant("fp32")
        >>> variant.executable, [proof.tensor for proof in variant.serving.evidence.parity]
        (False, ['scores'])
    """

    serving: Serving
    manifest: Manifest
    descriptor: Descriptor
    blobs: Blobs

    @property
    def name(self) -> str:
        return self.serving.variant

    @property
    def signature(self) -> Signature:
        return self.serving.signature

    @property
    def executable(self) -> bool:
        """Whether loading it can run its author's code: all formats but ONNX can."""
        return self.serving.format != "onnx"

    @property
    def size(self) -> int:
        """The bytes of its graph and weights."""
        return sum(layer.size for layer in self.manifest.layers if layer.media_type == manifest.WEIGHT)

    @property
    def graph(self) -> Descriptor:
        """The layer that an engine opens, such as the ONNX graph: the first weight layer."""
        return next(layer for layer in self.manifest.layers if layer.media_type == manifest.WEIGHT)

    @property
    def weights(self) -> tuple[Descriptor, ...]:
        """The layers that the graph refers to: one per large tensor or part of the model."""
        weights = (layer for layer in self.manifest.layers if layer.media_type == manifest.WEIGHT)
        return tuple(layer for layer in weights if layer is not self.graph)

    @property
    def has_graphs(self) -> bool:
        """Whether it consists of ONNX graphs, entirely or in part."""
        return self.serving.format in ("onnx", "partitioned")

    def graphs(self) -> Iterator[Descriptor]:
        """Yield the distinct layers that are ONNX graphs: the model, or its parts.

        Raises:
            InvalidArchive: the plan is damaged, or names a part that the manifest does not list.
        """
        if self.serving.format == "onnx":
            yield self.graph
            yield from self._encoders()
        elif self.serving.format == "partitioned":
            plan = manifest.decode(PartitionPlan, read_document(self.blobs, self.graph), "the plan")
            layers = {layer.hex: layer for layer in self.weights}
            for segment in plan.segments:
                if segment.blob not in layers:
                    raise InvalidArchive(
                        f"the plan of variant '{self.name}' refers to a blob that is not its own: {segment.blob}, "
                        "which the manifest does not list"
                    )
            parts = dict.fromkeys(segment.blob for segment in plan.segments if segment.format == "onnx")
            yield from (layers[part] for part in parts)

    def _encoders(self) -> Iterator[Descriptor]:
        encoder = self.serving.generation.encoder if self.serving.generation is not None else None
        if encoder is None:
            return
        found = [layer for layer in self.weights if layer.hex == encoder.blob]
        if not found:
            raise InvalidArchive(
                f"variant '{self.name}' has its encoder in a blob that is not its own: {encoder.blob or 'none'}, which "
                "the manifest does not list"
            )
        yield found[0]

    def python_plan(self) -> PythonPlan | None:
        """Return the plan of a variant of format ``python``; None of any other.

        Raises:
            InvalidArchive: it is damaged, or names a blob that the manifest does not list.
        """
        if self.serving.format != "python":
            return None
        plan = manifest.decode(PythonPlan, read_document(self.blobs, self.graph), "the plan")
        own = {layer.hex for layer in self.weights}
        for name, blob in plan.files.items():
            if blob not in own:
                raise InvalidArchive(
                    f"the plan of variant '{self.name}' refers to a blob that is not its own: {one_line(name)}, {blob}"
                )
        return plan

    def read_graph(self, graph: Descriptor) -> bytes:
        """Return one of :meth:`graphs`, with its digest checked.

        Raises:
            InvalidArchive: it is missing or damaged, or has 2 GiB or more, which exceeds any ONNX graph.
        """
        if graph.size >= _MAX_GRAPH_BYTES:
            raise InvalidArchive(f"graph {graph.digest} has {graph.size} bytes; ONNX graphs are smaller than 2 GiB")
        return read(self.blobs, graph)

    def check_own(self) -> None:
        """Check that its graphs, and its plan, refer only to its own layers.

        Raises:
            InvalidArchive: a graph or the plan refers to something else, or is damaged.
        """
        self.python_plan()
        own = {layer.hex.encode() for layer in self.weights}
        for graph in self.graphs():
            try:
                found = onnx_wire.locations(self.read_graph(graph))
            except InvalidArchive as error:
                raise InvalidArchive(f"variant '{self.name}': graph {graph.digest}: {error}") from error
            for location in found:
                if location not in own:
                    shown = one_line(location.decode(errors="backslashreplace"))
                    raise InvalidArchive(
                        f"variant '{self.name}' refers to a blob that is not its own: {shown}; the data of its "
                        "tensors must be in blobs that its manifest lists, and be named by their hex digests"
                    )

    def check_answers_at_once(self, what: str) -> None:
        """Check that a call of its graph is an answer.

        Args:
            what: needs that, for the message.

        Raises:
            Unsupported: it is a decoder, whose answers are many calls.
        """
        if self.serving.generation is not None:
            raise Unsupported(
                f"'{self.serving.name}' generates its answers token by token; {what} is for models that answer in one "
                "call: measure its server with ingot bench"
            )

    def path(self) -> Path:
        """Return the graph's file, with its weights in the same folder, valid while the variant or its archive is
        referenced.

        Raises:
            InvalidArgument: the archive is not unpacked; see :meth:`unpacked`.
        """
        if not isinstance(self.blobs, BlobFolder):
            raise InvalidArgument(f"variant '{self.name}' is inside an archive file; unpack the archive first")
        return self.blobs.path(self.graph)

    def unpacked(self) -> Variant:
        """Return this variant with its blobs as files, without those of the archive's other variants."""
        if isinstance(self.blobs, BlobFolder):
            return self
        folder = BlobFolder.scratch()
        for layer in self.manifest.layers:
            folder.copy(self.blobs, layer)
        return replace(self, blobs=folder)

    def document(self, name: str) -> bytes | None:
        """Return a document of the variant, such as ``report.json``, or None."""
        for layer in self.manifest.layers:
            if layer.media_type == manifest.DOCUMENT and layer.annotations.get(manifest.FILEPATH) == name:
                return read(self.blobs, layer)
        return None

    def goldens(self) -> tuple[Golden, ...]:
        """Return the golden cases, possibly none.

        Those of a decoder have the input ``prompt`` and the output ``tokens``, its greedy answer, both INT64[n].

        Raises:
            InvalidArchive: they are damaged, or do not match the signature.
        """
        layer = self.manifest.layer(manifest.GOLDENS)
        cases = goldens.decode(read(self.blobs, layer)) if layer else ()
        if self.serving.generation is not None:
            return tuple(map(_check_tokens, cases))
        for case in cases:
            try:
                check_inputs(self.signature, case.inputs)
            except InvalidArgument as error:
                raise InvalidArchive(f"the goldens do not match this model: {error}") from error
            if set(case.outputs) != {spec.name for spec in self.signature.outputs}:
                raise InvalidArchive(f"the goldens do not match this model: their outputs are {list(case.outputs)}")
            if case.raw:
                self._check_raw(case)
        return cases

    def _check_raw(self, case: Golden) -> None:
        steps = self.serving.steps
        known = {spec.name for spec in steps.inputs} if steps is not None else set()
        needed = known - set(steps.optional) if steps is not None else set()
        if steps is None or not needed <= set(case.raw) <= known:
            raise InvalidArchive(f"the goldens do not match this model: their raw inputs are {list(case.raw)}")
        if set(case.answers) != {spec.name for spec in steps.outputs}:
            raise InvalidArchive(f"the goldens do not match this model: their answers are {list(case.answers)}")

    def rerun(self, run: Callable[[Values], dict[str, Array]]) -> tuple[Golden, ...]:
        """Return the golden cases with the outputs, and answers of steps, of another form of the model.

        Raises:
            InvalidArchive: the goldens or a file of the steps are damaged.
        """
        steps = self.opened_steps() if any(case.raw for case in self.goldens()) else None
        cases = []
        for case in self.goldens():
            outputs = run(case.inputs)
            answers = steps.finish(steps.prepare(case.raw), outputs) if steps is not None and case.raw else {}
            cases.append(Golden(case.inputs, outputs, case.raw, answers))
        return tuple(cases)

    def opened_steps(self, decoding: Callable[[ItemStep], Apply] | None = None) -> OpenedSteps | None:
        """Return the steps around the graph ready to run, see :meth:`ingot.steps.Steps.open`; None if it has none.

        Raises:
            InvalidArchive: a file is missing or damaged.
            Unsupported: a package that a step needs is not installed.
        """
        steps = self.serving.steps
        return None if steps is None else steps.open(self.step_file, self.signature, decoding)

    def opened_texts(self) -> CompletionTexts | None:
        """Return a decoder's tokenizer and chat template ready to run; errors as for :meth:`opened_steps`."""
        found = self.serving.generation
        if found is None or not found.tokenizer:
            return None
        content = self.step_file(found.tokenizer)
        return CompletionTexts(content, found.tokenizer, found.chat_template, found.special)

    def step_file(self, name: str) -> bytes:
        """Return a file of the steps, with its digest checked.

        Raises:
            InvalidArchive: it is missing, damaged or too large.
        """
        for layer in self.manifest.layers:
            if layer.media_type == manifest.STEP_FILE and layer.annotations.get(manifest.FILEPATH) == name:
                if layer.size > _MAX_STEP_FILE:
                    raise InvalidArchive(f"'{name}' has {layer.size} bytes; files of steps may have {_MAX_STEP_FILE}")
                return read(self.blobs, layer)
        raise InvalidArchive(f"variant '{self.name}' lacks the file '{name}', which its steps need")

    def step_files(self) -> dict[str, bytes]:
        """Return all files of the steps and of a decoder by name; errors as for :meth:`step_file`."""
        steps, generation = self.serving.steps, self.serving.generation
        names = [*(steps.files if steps is not None else ())]
        names += [generation.tokenizer] if generation is not None and generation.tokenizer else []
        return {name: self.step_file(name) for name in names}


def _check_tokens(case: Golden) -> Golden:
    for names, tensors in (({"prompt"}, case.inputs), ({"tokens"}, case.outputs)):
        if set(tensors) != names or any(tokens.dtype != np.int64 or tokens.ndim != 1 for tokens in tensors.values()):
            raise InvalidArchive(
                "the goldens do not match this model: those of a decoder are a prompt and its tokens, each INT64[n]"
            )
    return case


def add_variant(
    blobs: BlobFolder,
    serving: Serving,
    graph: Descriptor,
    weights: Sequence[Descriptor],
    cases: Sequence[Golden],
    documents: Mapping[str, bytes] | None = None,
    step_files: Mapping[str, bytes] | None = None,
) -> Descriptor:
    """Write one variant's documents and return its manifest's descriptor, for :meth:`Archive.create`.

    Args:
        blobs: the folder, which contains the blobs of ``graph`` and ``weights`` already.
        serving: the properties for the runtime.
        graph: the file that an engine opens, such as the ONNX model, which refers to ``weights`` by hex digest.
        weights: one descriptor per large tensor or part.
        cases: golden cases.
        documents: files for people, by name, such as ``report.json``.
        step_files: the files that the steps need, by name.

    Raises:
        InvalidArchive: ``graph`` refers to a file outside of ``weights``, which no store would accept.
    """
    layers = [graph, *weights]
    if serving.format == "onnx" and graph.size < _MAX_GRAPH_BYTES:
        serving = _with_bounds(serving, blobs.path(graph))
    layers.append(blobs.put(manifest.encode(serving), manifest.SERVING, {manifest.FILEPATH: "serving.json"}))
    if cases:
        layers.append(blobs.put(goldens.encode(cases), manifest.GOLDENS, {manifest.FILEPATH: "goldens.safetensors"}))
    for name, content in (step_files or {}).items():
        layers.append(blobs.put(content, manifest.STEP_FILE, {manifest.FILEPATH: name}))
    for name, content in (documents or {}).items():
        layers.append(blobs.put(content, manifest.DOCUMENT, {manifest.FILEPATH: name}))
    config = ModelConfig(
        descriptor=manifest.ModelDescriptor(name=serving.name, created_at=serving.provenance.created),
        config=manifest.ModelDetails(
            format=serving.format,
            precision=serving.precision,
            quantization=serving.recipe["name"] if serving.recipe else None,
        ),
        modelfs=manifest.ModelFS(diff_ids=tuple(layer.digest for layer in layers)),
    )
    document = Manifest(config=blobs.put(manifest.encode(config), manifest.MODEL_CONFIG), layers=tuple(layers))
    entry = blobs.put(manifest.encode(document), manifest.MANIFEST, {manifest.VARIANT: serving.variant})
    read_variant(blobs, entry).check_own()
    return entry


def _with_bounds(serving: Serving, graph: Path) -> Serving:
    """Record whether the sizes of inputs bound an ONNX graph's work and memory, next to what was measured of it."""
    bounds = bounds_of(graph, serving.signature)
    evidence = BoundsEvidence(reasons=bounds.reasons, peak=bounds.formula)
    if bounds.bounded:
        before = serving.evidence.bounds or evidence
        measured = [(call.sizes, call.measured) for call in before.calls if call.measured]
        calls = [
            CallBytes(sizes=sizes, peak=bounds.peak(sizes), measured=nbytes)
            for sizes, nbytes in [(_illustration(serving.signature), 0), *measured]
        ]
        evidence = evidence.model_copy(update={"calls": tuple(calls)})
    return serving.model_copy(update={"evidence": serving.evidence.model_copy(update={"bounds": evidence})})


def _illustration(signature: Signature) -> dict[str, int]:
    """Return usual sizes of the named dimensions, to show a bound at."""
    return {
        name: signature.range(name).nearest(_USUAL_BATCH if name == signature.batch else _USUAL_SIZE)
        for spec in signature.inputs
        for name in spec.shape
        if isinstance(name, str)
    }


def read_variant(blobs: Blobs, entry: Descriptor) -> Variant:
    """Return the variant of a manifest.

    Raises:
        InvalidArchive: a document is missing or damaged, or it is not a variant.
    """
    document = manifest.decode(Manifest, read_document(blobs, entry), f"manifest {entry.digest}")
    layer = document.layer(manifest.SERVING)
    if layer is None or document.layer(manifest.WEIGHT) is None:
        raise InvalidArchive(f"manifest {entry.digest} lacks a serving.json or a model: it is not an Ingot variant")
    serving = manifest.decode(Serving, read_document(blobs, layer), "serving.json")
    return Variant(serving, document, entry, blobs)
