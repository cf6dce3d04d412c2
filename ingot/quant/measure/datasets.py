"""The samples of a quantization: those for calibration, and those for the metric."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ingot.errors import InvalidArgument
from ingot.model_store import Variant
from ingot.quant.config import QuantConfig
from ingot.quant.data import tokens, variance
from ingot.quant.data.samples import Data, Samples
from ingot.quant.data.synthetic import synthetic
from ingot.quant.metric import Metric, parse_metric
from ingot.quant.metric import tokens as token_metrics
from ingot.tensors import Array, arrays

# The largest number of rows for calibration; more do not change the ranges.
_CALIBRATION = 256
# The largest number of rows for the metric.
_EVALUATION = 2048
# With fewer rows than this, all are used for both.
_FEW = 16
_GENERATED = 64


@dataclass(frozen=True)
class Datasets:
    """The samples of a quantization.

    Attributes:
        calibration: the samples for calibration; None without data.
        evaluation: the samples for the metric.
        held_out: whether none of the latter is used for calibration.
        metric: of the latter.
        generated: whether they are synthetic.
        notes: remarks for the report.
    """

    calibration: Samples | None
    evaluation: Samples
    metric: Metric
    held_out: bool = True
    generated: bool = False
    notes: tuple[str, ...] = ()


def prepare(
    variant: Variant,
    data: Data | None,
    validate: Data | None,
    transform: str | None,
    config: QuantConfig,
) -> Datasets:
    """Read the data and split it; without data, generate inputs.

    Which metric is the default one of raw data depends on its labels.

    Args:
        variant: the model whose inputs they are.
        data: real inputs, or None.
        validate: data for the metric, or None for a part of ``data``.
        transform: the preprocessing of images.
        config: the recipe, the metric and the seed.

    Raises:
        InvalidArgument: the data does not fit the model, the metric or the recipe, or all of its rows are equal.
    """
    if variant.serving.generation is not None:
        return _texts(variant, validate if validate is not None else data, config)
    signature, steps = variant.signature, functools.cache(variant.opened_steps)
    metric = parse_metric(config.metric, signature, steps)  # a wrong one is reported before the data is read
    main = Samples.read(signature, data, transform=transform, steps=steps) if data is not None else None
    notes = _variance(main) if main is not None else ()
    if validate is not None:
        other = Samples.read(signature, validate, transform=transform, purpose="validation data", steps=steps)
        metric = parse_metric(config.metric, signature, steps, other)
        notes += _variance(other)
        datasets = _validated(main, other, config, metric)
    elif main is not None:
        metric = parse_metric(config.metric, signature, steps, main)
        datasets = _divided(main, config, metric)
    else:
        datasets = _generated(variant, config, metric)
    rows = datasets.evaluation.rows
    if metric.labels is not None and 0 < rows * config.max_drop < 1:
        notes += (f"{rows} samples cannot show a drop of {config.max_drop:g}: one row is {1 / rows:.2g}; pass more",)
    return replace(datasets, notes=(*datasets.notes, *notes))


def _texts(variant: Variant, data: Data | None, config: QuantConfig) -> Datasets:
    """Return the texts for a decoder, whose recipes need no calibration."""
    metric = token_metrics.parse(config.metric)
    if data is not None:
        return Datasets(None, tokens.read(variant, data, "text"), metric)
    notes = ("measured on generated texts only: pass one (--data text.txt) for a reliable result",)
    samples = tokens.generated(variant, config.seed)
    return Datasets(None, samples, metric, held_out=False, generated=True, notes=notes)


def _variance(samples: Samples) -> tuple[str, ...]:
    """Return notes on inputs that are the same in all rows, which masks of raw rows are, as each is read alone."""
    notes = variance.check(samples)
    return () if samples.raw else notes


def _divided(main: Samples, config: QuantConfig, metric: Metric) -> Datasets:
    """Split data that came without validation data."""
    metric.check(main)
    if main.rows < _FEW:
        notes = (*main.notes, f"all {main.rows} samples were used for both calibration and the metric")
        return Datasets(main, main, metric, held_out=False, notes=notes)
    first, second = main.split(min(0.5, _CALIBRATION / main.rows), config.seed, metric.groups)
    return Datasets(first, second.take(_EVALUATION, config.seed, metric.groups), metric, notes=main.notes)


def _validated(main: Samples | None, other: Samples, config: QuantConfig, metric: Metric) -> Datasets:
    """Return datasets with separate validation data."""
    metric.check(other)
    notes = (*(main.notes if main is not None else ()), *other.notes)
    evaluation = other.take(_EVALUATION, config.seed, metric.groups)
    if main is None:
        _check_recipe(config)
        return Datasets(None, evaluation, metric, notes=(*notes, *_without_data(config)))
    calibration = main.take(_CALIBRATION, config.seed)
    used = set(_row_hashes(calibration))
    shared = sum(row in used for row in _row_hashes(evaluation))
    if shared:
        notes = (*notes, f"{shared} of the {evaluation.rows} rows of the metric were also used for calibration")
    return Datasets(calibration, evaluation, metric, held_out=not shared, notes=notes)


def _row_hashes(samples: Samples) -> Iterator[bytes]:
    """Yield a digest of each row's inputs, without extras such as labels, which calibration does not use."""
    signature = samples.signature
    axes = signature.batch_axes(signature.inputs) if signature.batch is not None else {}
    for batch in samples.batches():
        whole = {name: _hash(array) for name, array in batch.inputs.items() if name not in axes}
        rows = {name: np.moveaxis(array, axes[name], 0) for name, array in batch.inputs.items() if name in axes}
        for row in range(batch.rows):
            state = hashlib.sha256()
            for name in sorted(batch.inputs):
                state.update(whole[name] if name in whole else _hash(rows[name][row : row + 1]))
            yield state.digest()


def _hash(array: Array) -> bytes:
    return hashlib.sha256(repr(array.shape).encode() + arrays.to_bytes(array)).digest()


def _check_recipe(config: QuantConfig) -> None:
    if config.recipe is not None and config.recipe.needs_data:
        raise InvalidArgument(
            f"the recipe '{config.recipe.name}' needs calibration data; pass some (--calibrate), or use dynamic-int8"
        )


def _without_data(config: QuantConfig) -> tuple[str, ...]:
    note = "recipes that need calibration data were not tried"
    return (note,) if config.recipe is None else ()


def _generated(variant: Variant, config: QuantConfig, metric: Metric) -> Datasets:
    _check_recipe(config)
    if metric.labels is not None:
        raise InvalidArgument(f"the metric '{metric.name}' needs labels, and no data was given")
    goldens = [golden.inputs for golden in variant.goldens()]
    samples = synthetic(variant.signature, _GENERATED, config.seed, goldens)
    notes = ("measured on generated inputs only: pass real ones for a reliable result", *_without_data(config))
    return Datasets(None, samples, metric, held_out=False, generated=True, notes=notes)
