"""Triton's ensembles as pipelines.

Source: https://docs.nvidia.com/deeplearning/triton-inference-server/user-guide/docs/user_guide/ensemble_models.html
"""

from __future__ import annotations

import re
from pathlib import Path

from ingot.errors import InvalidArgument
from ingot.importing import pipelines
from ingot.importing.pbtxt import Config, EnsembleStep
from ingot.importing.record import Candidate, Imported
from ingot.model_store.references import name_from

BACKEND = "ensemble"


def candidate(model: Path, config: Config, others: frozenset[str]) -> Candidate:
    """Return an ensemble as a candidate with lines of ``ingot.toml``.

    Args:
        model: its folder.
        config: its configuration.
        others: the ensembles of the repository.

    Returns:
        The candidate, without lines if it cannot become a pipeline: reading it raises the reason.
    """
    name = model.resolve().name
    lines, refusal = "", InvalidArgument(f"the ensemble {model} becomes lines of ingot.toml, which ingot import prints")
    try:
        lines = _lines(model, name, config, others)
    except InvalidArgument as error:
        refusal = error

    def refuse() -> Imported:
        raise refusal

    return Candidate(str(model), name_from(name), None, refuse, called=name, lines=lines)


def _lines(model: Path, name: str, config: Config, others: frozenset[str]) -> str:
    called = f"the ensemble {model}"
    if nested := [step.model for step in config.steps if step.model in others]:
        raise InvalidArgument(
            f"{called} cannot become a pipeline: its step '{nested[0]}' is an ensemble; write the steps of that instead"
        )
    nodes = _nodes(config.steps)
    made = {item.name: item.name for item in config.inputs}
    for node, step in nodes.items():
        made |= {tensor: f"{node}.{output}" for output, tensor in step.outputs.items()}
    read = {tensor for step in config.steps for tensor in step.inputs.values()} | {each.name for each in config.outputs}
    if unmade := sorted(read - made.keys()):
        raise InvalidArgument(f"{called} cannot become a pipeline: no step makes '{unmade[0][:100]}'")
    table = {
        "inputs": [item.name for item in config.inputs],
        "outputs": {item.name: made[item.name] for item in config.outputs},
        "nodes": {
            node: {"model": step.model, "inputs": {key: made[tensor] for key, tensor in step.inputs.items()}}
            for node, step in nodes.items()
        },
    }
    return pipelines.lines(called, name, {step.model: _source(step) for step in config.steps}, table)


def _nodes(steps: tuple[EnsembleStep, ...]) -> dict[str, EnsembleStep]:
    """Return the steps by names of nodes: those of their models, with a number where a model has several."""
    found: dict[str, EnsembleStep] = {}
    for step in steps:
        name = re.sub(r"[^A-Za-z0-9_-]", "_", step.model)
        name = name if re.match(r"[A-Za-z_]", name) else f"_{name}"
        number = sum(re.fullmatch(rf"{re.escape(name)}(_\d+)?", other) is not None for other in found)
        found[f"{name}_{number + 1}" if number else name] = step
    return found


def _source(step: EnsembleStep) -> str:
    name = name_from(step.model)
    return f"{name}:{step.version}" if step.version > 0 else name
