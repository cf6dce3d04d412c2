"""Metrics by name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any

from ingot.errors import InvalidArgument
from ingot.quant.data.samples import Samples
from ingot.quant.data.sources import OpenSteps
from ingot.quant.data.sources.items import LABELS
from ingot.quant.metric import answers, fidelity
from ingot.quant.metric.base import Metric, float_outputs
from ingot.quant.metric.function import Function, load_function
from ingot.quant.metric.labelled import Classes, Errors, Labelled, RankCorrelation
from ingot.tensors import Signature

_AGREEMENT: dict[str, Callable[[Signature, str | None], Metric]] = {
    "cosine": fidelity.cosine,
    "top1": fidelity.top1,
    "sqnr": fidelity.sqnr,
    "similarity": fidelity.Similarity,
}
_LABELLED: dict[str, type[Labelled]] = {
    "accuracy": Classes,
    "top5": Classes,
    "f1": Classes,
    "mae": Errors,
    "mse": Errors,
    "rmse": Errors,
    "spearman": RankCorrelation,
}
_OPTIONS = {**dict.fromkeys(_AGREEMENT, ("output",)), **dict.fromkeys(answers.METRICS, ())}
NAMES = (*_AGREEMENT, *_LABELLED, *answers.METRICS)

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def parse_metric(
    spec: str | Callable[[Any, Any], Any] | None,
    signature: Signature,
    steps: OpenSteps = lambda: None,
    samples: Samples | None = None,
) -> Metric:
    """Return the requested metric.

    Args:
        spec: None for ``cosine`` (``top1`` of a model without floating-point outputs); a name, with options as in
            ``accuracy:labels=y,output=logits``; ``module:function``; or a function ``(outputs, data) -> float`` whose
            higher values are better. ``cosine``, ``top1``, ``sqnr`` and ``similarity`` measure the agreement with the
            original; ``accuracy``, ``top5``, ``f1`` (macro), ``mae``, ``mse``, ``rmse`` and ``spearman`` need labels,
            by default the extra "labels". ``answers``, the agreement of final answers, and ``pairs``, the correlation
            of the similarity of pairs of texts with their scores, need steps and raw data.
        signature: the model's signature.
        steps: returns the model's, if it has some.
        samples: the data, which decides on the default: of raw data that of its labels, otherwise ``answers``.

    Raises:
        InvalidArgument: there is no such metric, option or output, or the output is ambiguous.
    """
    if spec is None and samples is not None and samples.raw and (opened := steps()) is not None:
        spec = answers.default(opened, samples)
    if spec is None:
        spec = "cosine" if float_outputs(signature) else "top1"
    if not isinstance(spec, str):
        if not callable(spec):
            raise InvalidArgument(f"a metric is a name or a function, not of type {type(spec).__name__}")
        return Function(spec, getattr(spec, "__qualname__", type(spec).__name__))
    name, rest = (part.strip() for part in spec.partition(":")[::2])
    if name not in NAMES:
        if _FUNCTION.fullmatch(spec.strip()):
            return load_function(spec.strip())
        near = difflib.get_close_matches(name, NAMES, 1)
        raise InvalidArgument(
            f"there is no metric '{name}'{f'; did you mean {near[0]}?' if near else ''}; known: {', '.join(NAMES)}, "
            "and module:function"
        )
    options = _options(spec, rest, _OPTIONS.get(name, ("labels", "output")))
    if name in answers.METRICS:
        return answers.metric(name, steps())
    if name in _AGREEMENT:
        return _AGREEMENT[name](signature, options.get("output"))
    return _LABELLED[name](name, signature, options.get("labels", LABELS), options.get("output"))


def _options(spec: str, text: str, known: tuple[str, ...]) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in known or not value or name in options:
            raise InvalidArgument(
                f"'{part}' of the metric '{spec}' is not a valid option; the options, each at most once, are: "
                + ", ".join(f"{option}=NAME" for option in known)
            )
        options[name] = value
    return options
