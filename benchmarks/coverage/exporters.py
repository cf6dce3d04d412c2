"""The compared exporters; each turns a case into a verdict.

``python -m benchmarks.coverage.exporters CASE EXPORTER FILE`` runs one and writes its verdict.
"""

from __future__ import annotations

import importlib
import json
import re
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch.onnx._internal.exporter._errors import ConversionError

from benchmarks.coverage import zoo
from benchmarks.coverage.case import Case, Tensors, nest
from benchmarks.coverage.judge import Broken, Candidate, Wrong, judge
from benchmarks.coverage.verdict import Verdict
from ingot.errors import IngotError
from ingot.tensors import Array, Range

MEMORY = 12 << 30
"""Bytes of address space that one export may take."""

# PyTorch's message explains if it names a line of the model's own code or suggests a change.
_EXPLANATIONS = re.compile(
    r"(coverage/own|transformers/models)/[\w/]+\.py\"?(, line |:)\d+|[Ss]uggested fix|To fix", re.A
)


# Flags of a model's configuration, which transformers.exporters sets there and does not trace.
_FLAGS = {"use_cache", "return_dict", "output_attentions", "output_hidden_states"}


def run(case: Case, exporter: str) -> Verdict:
    """Export a case and judge the result."""
    verdict = Verdict(case.name, case.family, exporter)
    with tempfile.TemporaryDirectory() as folder:
        start = export(case, verdict, Path(folder))
        if start is None:
            return verdict
        try:
            verdict.error = judge(case, start)
            verdict.status = "correct"
        except Wrong as error:
            verdict.status, verdict.message = "wrong", str(error)
        except Broken as error:
            verdict.status, verdict.message = "broken", str(error)
    return verdict


def export(case: Case, verdict: Verdict, folder: Path) -> Callable[[], Candidate] | None:
    """Export a case by the verdict's exporter, and return what starts the exported form, or None if it is refused."""
    began, spent = time.perf_counter(), time.process_time()
    try:
        start = EXPORTERS[verdict.exporter](case, verdict, folder)
    except Exception as error:  # noqa: BLE001 - exporters may raise anything, which is measured
        verdict.message = _message(error)
        verdict.status = "explained" if _explains(error, verdict.exporter) else "unexplained"
        return None
    finally:
        verdict.seconds = round(time.perf_counter() - began, 1)
        verdict.cpu = round(time.process_time() - spent, 1)
    verdict.captured = verdict.lowered = True
    return start


def plain(case: Case, verdict: Verdict, folder: Path) -> Callable[[], Candidate]:
    """Export by ``torch.onnx.export(dynamo=True)``, with the same dynamic dimensions and ranges."""
    shapes = _shapes(case)
    try:
        program = torch.onnx.export(
            case.module(),
            (),
            kwargs={**nest(case.make(case.example_sizes, 0)), **case.constants},
            dynamic_shapes={**nest(shapes), **dict.fromkeys(case.constants)},
            input_names=list(shapes),
            dynamo=True,
            verbose=False,
        )
    except ConversionError:
        verdict.captured = True
        raise
    if program is None:
        raise RuntimeError("torch.onnx.export returned None")
    path = folder / "model.onnx"
    program.save(path)
    return lambda: _candidate(path)


def transformers(case: Case, verdict: Verdict, folder: Path) -> Callable[[], Candidate]:
    """Export by ``transformers.exporters``, which patches models of transformers and accepts any other module too.

    Its documentation asks for deferred asserts where dimensions have ranges.
    """
    exporters: Any = importlib.import_module("transformers.exporters")  # an optional dependency
    shapes = {**nest(_shapes(case)), **dict.fromkeys(case.constants)}
    for name in _FLAGS & set(shapes):
        del shapes[name]
    config = exporters.OnnxConfig(dynamic_shapes=shapes, prefer_deferred_runtime_asserts_over_guards=True)
    inputs = {**nest(case.make(case.example_sizes, 0)), **case.constants}
    model, _ = exporters.OnnxExporter().export_program(case.module(), inputs, config)
    verdict.captured = True
    path = folder / "model.onnx"
    exporters.OnnxExporter.save_program(model, path)
    return lambda: _candidate(path)


def _shapes(case: Case) -> dict[str, tuple[Any, ...]]:
    """Return the dynamic dimensions of each input, by its flat name, as ``torch.export`` expects them."""
    dims = {symbol: _dim(symbol, bounds) for symbol, bounds in case.ranges.items()}
    return {spec.name: tuple(dims[dim] if isinstance(dim, str) else None for dim in spec.shape) for spec in case.specs}


def _dim(symbol: str, bounds: Range) -> Any:
    if bounds.step == 1:
        return torch.export.Dim(symbol, min=bounds.low if bounds.low > 1 else None, max=bounds.high)
    low, high = bounds.low // bounds.step, None if bounds.high is None else bounds.high // bounds.step
    return bounds.step * torch.export.Dim(f"{symbol}_part", min=low if low > 1 else None, max=high)


def ingot(case: Case, verdict: Verdict, folder: Path) -> Callable[[], Candidate]:
    """Export by ``ingot.export_model``."""
    from ingot.export import export_model  # here, so that nothing of Ingot is loaded while the plain exporter runs

    def progress(step: str) -> None:
        verdict.captured |= step.startswith(("Rewriting", "Translating"))
        verdict.lowered |= step == "Rewriting the ONNX graph"

    archive = export_model(
        case.module(),
        nest(case.make(case.example_sizes, 0)),
        inputs=case.inputs,
        constants=case.constants,
        lift_state=case.stateful,
        progress=progress,
    )
    own = {spec.name for spec in case.specs}
    signature = archive.signature
    states = {spec.name: case.module().get_buffer(spec.name) for spec in signature.inputs if spec.name not in own}
    serving = archive.variant().serving
    verdict.notes = [*serving.provenance.notes, *serving.evidence.deviations]
    bounds = serving.evidence.bounds

    def start() -> Candidate:
        # Servers limit neither requests nor batches by such a bound: it is a fault of the export.
        if bounds is not None and bounds.loosest is not None:
            raise Broken(str(bounds.loosest))
        return _candidate(archive.variants[0].path(), [spec.name for spec in signature.outputs], states)

    return start


EXPORTERS = {"plain": plain, "transformers": transformers, "ingot": ingot}


def _candidate(
    path: Path, outputs: list[str] | None = None, states: Mapping[str, torch.Tensor] | None = None
) -> Candidate:
    """Return a new session of ONNX Runtime, the same for both exporters.

    Args:
        path: the ONNX file.
        outputs: the names of its outputs in order; without them, as they are in the file.
        states: inputs that keep their value between calls, with the first one; ``NAME_next`` gives the new one.

    Raises:
        Broken: ONNX Runtime does not load the file.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions share no base
        raise Broken(f"it cannot be loaded: {' '.join(str(error).split())[:400]}") from error
    taken = {node.name for node in session.get_inputs()}
    names = outputs or [node.name for node in session.get_outputs()]
    kept = {name: value.numpy() for name, value in (states or {}).items()}

    def call(inputs: Tensors) -> list[Array]:
        # transformers.exporters calls an input that is also an output's name so.
        names_of = {name: name if name in taken else f"input.{name}" for name in inputs}
        feed = {names_of[name]: tensor.numpy() for name, tensor in inputs.items() if names_of[name] in taken}
        answers = dict(zip(names, session.run(names, {**feed, **kept}), strict=True))
        kept.update({name: answers.pop(f"{name}_next") for name in kept})
        return list(answers.values())

    return call


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _explains(error: Exception, exporter: str) -> bool:
    if exporter == "ingot":
        return isinstance(error, IngotError)  # anything else has escaped it
    return any(_EXPLANATIONS.search(str(item)) for item in _chain(error))


def _message(error: Exception) -> str:
    """Return an Ingot error as it is, and of torch's chain of errors the innermost, which says most."""
    if isinstance(error, IngotError):
        return str(error)
    cause = list(_chain(error))[-1]
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"


def main(name: str, exporter: str, out: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.set_num_threads(1)
    verdict = run(zoo.find(name), exporter)
    Path(out).write_text(json.dumps(asdict(verdict)))


if __name__ == "__main__":
    main(*sys.argv[1:])
