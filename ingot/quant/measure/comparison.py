"""``ingot.compare``: two models side by side, on the same data and timed in turn."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ingot import tensors
from ingot.errors import InvalidArgument, Unsupported
from ingot.model_store import Archive, Provenance, Variant
from ingot.model_store.format.evidence import distributions
from ingot.model_store.places import split_variant
from ingot.quant.data import variance
from ingot.quant.data.samples import Data, Samples
from ingot.quant.data.sources import OpenSteps
from ingot.quant.metric import parse_metric
from ingot.quant.metric.agreement import by_output
from ingot.quant.report import words
from ingot.quant.report.records import DataRecord, ModelComparison, Score, Side
from ingot.runtime import Engine, load_engine
from ingot.runtime.engines.loader import engine_of, spec_of
from ingot.runtime.machine import devices
from ingot.runtime.profiling import profile
from ingot.tensors import Dim, Range, Signature, TensorSpec
from ingot.tensors.values import ValueRange

Progress = Callable[[str], None]
Source = Variant | Archive | str | os.PathLike[str]
"""A model to compare: a variant, an archive (its preferred variant), or a path, as in ``m.ingot#fp32``."""


def compare(
    before: Source,
    after: Source,
    data: Data | None = None,
    *,
    metric: str | Callable[[Any, Any], Any] | None = None,
    transform: str | None = None,
    batches: Iterable[int] = profile.BATCHES,
    device: str = "cpu",
    threads: int | None = None,
    allow_code: bool = False,
    names: tuple[str, str] | None = None,
    progress: Progress = lambda step: None,
) -> ModelComparison:
    """Run two models on the same data, and time them in turn.

    Examples:
        >>> rows = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
        >>> result = ingot.compare("net.ingot", "net.ingot", {"x": rows}, batches=())
        >>> [(output.tensor, output.error) for output in result.outputs], result.size_ratio
        ([('scores', 0.0)], 1.0)

    Args:
        before: the model that the other is compared with.
        after: the other model, with the same inputs and outputs.
        data: the inputs, see :meth:`ingot.quant.data.samples.Samples.read`; by default the golden inputs of the first,
            which are too few to show more than whether a model is broken.
        metric: see :func:`ingot.quant.metric.parse_metric`; by default the cosine of the worst output.
        transform: how images become arrays, see :class:`ingot.quant.data.sources.transform.ImageTransform`.
        batches: the batch sizes to time; empty for no timing.
        device: ``cpu``, ``cuda`` or ``auto``.
        threads: CPU threads for one call; by default one per core that this process may use.
        allow_code: load variants of formats that can run their author's code: all but ``onnx``.
        names: the names of the two archives in the result; by default their paths, or names.
        progress: called with the name of each step as it begins.

    Returns:
        ``speedups`` by batch size, ``size_ratio``, ``score_before``, ``score_after`` and ``drop`` (each ``value``,
        ``low`` and ``high``), ``outputs`` (``tensor``, ``cosine``, ``sqnr`` in dB, ``top1``, ``error``), and of each
        model its ``latency`` in seconds and ``size`` in bytes.

    Raises:
        NotFound: there is no such file or variant.
        InvalidArgument: the inputs or outputs differ; the data does not fit, or there is none; no such metric.
        QuantizationError: the other's outputs have NaN, infinity or other shapes where the first's do not, so that
            the metric is undefined.
        Unsupported: no engine runs a variant here, or it needs ``allow_code``.
    """
    sizes = _batches(batches)
    first, second = _find(before), _find(after)
    if names is not None:
        first, second = replace(first, name=names[0]), replace(second, name=names[1])
    signature = _common(first, second)
    steps = functools.cache(first.variant.opened_steps)
    parse_metric(metric, signature, steps)  # a wrong one is reported before the data is read
    samples = _read(signature, first, data, transform, steps)
    if samples.raw and not first.has_steps_of(second):
        raise InvalidArgument(
            f"{first.label} and {second.label} make other tensors of raw data; pass tensors (.npz), or see the "
            "differences of their steps with ingot diff"
        )
    chosen = parse_metric(metric, signature, steps, samples)
    chosen.check(samples)
    varied = variance.check(samples) if data is not None else ()
    options: dict[str, Any] = {"device": device, "threads": threads, "allow_code": allow_code}
    progress("Loading")
    with _engine(first, options) as left, _engine(second, options) as right:
        progress(f"Running {first.label} on {samples.rows} rows")
        expected = [left.run(batch.inputs) for batch in samples.batches()]
        progress(f"Running {second.label} on the same rows")
        actual = [right.run(batch.inputs) for batch in samples.batches()]
        outputs, notes = by_output(signature, expected, actual, samples)
        scores = chosen.compare(expected, actual, samples)
        notes = [*chosen.notes(expected, scores.before, samples), *notes]
        progress("Timing both in turn")
        example = next(samples.batches(1)).inputs
        latencies = profile.measure_together([left, right], signature, example, sizes, settled=profile.steady)
    made = Provenance.of("", _packages(first, second))
    return ModelComparison(
        model=first.variant.serving.name,
        before=first.side(latencies[0]),
        after=second.side(latencies[1]),
        data=DataRecord(digest=samples.digest, source=_where(samples, data), evaluation_rows=samples.rows),
        goldens=data is None,
        metric=chosen.name,
        score_before=Score.of(scores.before),
        score_after=Score.of(scores.after),
        drop=Score.of(scores.drop),
        outputs=outputs,
        threads=threads or devices.cpu_count(),
        machine=devices.describe(),
        created=made.created,
        versions=made.versions,
        notes=(
            *_warnings(first, second, samples, data),
            *words.uncertainty(latencies[1]),
            *notes,
            *samples.notes,
            *varied,
        ),
    )


@dataclass(frozen=True)
class _Model:
    """A variant whose blobs are files, and the user's name of its archive."""

    variant: Variant
    name: str

    @property
    def label(self) -> str:
        return f"{self.name}#{self.variant.name}"

    def has_steps_of(self, other: _Model) -> bool:
        """Return whether both have the same steps, with the same files."""
        one, two = self.variant, other.variant
        return one.serving.steps == two.serving.steps and one.step_files() == two.step_files()

    def side(self, latency: Sequence[Any]) -> Side:
        return Side(
            archive=self.name,
            variant=self.variant.name,
            format=self.variant.serving.format,
            digest=self.variant.descriptor.digest,
            size=self.variant.size,
            latency=tuple(latency),
        )


def _find(source: Source) -> _Model:
    variant, name = _opened(source)
    variant.check_answers_at_once("ingot compare")
    return _Model(variant.unpacked(), name)


def _opened(source: Source) -> tuple[Variant, str]:
    if isinstance(source, Variant):
        return source, source.serving.name
    if isinstance(source, Archive):
        return source.variant(), source.name
    path, variant = split_variant(os.fspath(source))
    return Archive.open(path).variant(variant), path


@contextlib.contextmanager
def _engine(model: _Model, options: Mapping[str, Any]) -> Iterator[Engine]:
    try:
        engine = load_engine(spec_of(model.variant, **options))
    except (Unsupported, InvalidArgument) as error:
        raise type(error)(f"{model.label} cannot be run here: {error}") from error
    with contextlib.closing(engine):
        yield engine


def _batches(batches: Iterable[int]) -> list[int]:
    sizes = list(batches)
    if any(rows < 1 for rows in sizes):
        raise InvalidArgument(f"a call cannot be timed with {min(sizes)} rows; use batch sizes of 1 or more")
    return sizes


def _read(signature: Signature, first: _Model, data: Data | None, transform: str | None, steps: OpenSteps) -> Samples:
    if data is not None:
        return Samples.read(signature, data, transform=transform, purpose="data", steps=steps)
    inputs = [golden.inputs for golden in first.variant.goldens()]
    if not inputs:
        raise InvalidArgument(f"{first.label} has no golden inputs to compare on; pass data (--data)")
    return Samples.read(signature, inputs, purpose="golden inputs")


def _warnings(first: _Model, second: _Model, samples: Samples, data: Data | None) -> Iterator[str]:
    if data is None:
        yield (
            f"no data was given: the models were run on the {samples.rows} rows of the golden inputs of "
            f"{first.label}, which show whether a model is broken, but not how accurate it is"
        )
    if first.variant.descriptor.digest == second.variant.descriptor.digest:
        yield "both are the same variant: differences are noise"


def _where(samples: Samples, data: Data | None) -> str:
    if data is None:
        return "golden inputs of the archive"
    return samples.where.removeprefix(" in ") or f"{type(data).__name__} in memory"


def _common(first: _Model, second: _Model) -> Signature:
    """Return the signature that both models have.

    Raises:
        InvalidArgument: they have different ones.
    """
    one, other = first.variant.signature, second.variant.signature
    if one == other:
        return one
    for side in ("inputs", "outputs"):
        mine, theirs = getattr(one, side), getattr(other, side)
        try:
            tensors.check_same(Signature(mine, ()), Signature(theirs, ()))
        except InvalidArgument as error:
            raise InvalidArgument(
                f"{first.label} and {second.label} cannot be compared: the {side} of the first are {_listed(mine)}, "
                f"those of the second {_listed(theirs)}"
            ) from error
    for specs, others in ((one.inputs, other.inputs), (one.outputs, other.outputs)):
        if one.batch_axes(specs) != other.batch_axes(others):
            raise InvalidArgument(
                f"{first.label} and {second.label} cannot be compared: their batch dimensions differ: "
                f"{one.batch or 'none'} and {other.batch or 'none'}"
            )
    try:
        return _narrowed(one, other)
    except InvalidArgument as error:
        raise InvalidArgument(f"{first.label} and {second.label} accept no common inputs: {error}") from error


def _narrowed(one: Signature, other: Signature) -> Signature:
    """Return the first signature, limited to sizes and values that the other accepts too."""
    theirs = {spec.name: spec for spec in other.inputs}
    ranges = dict(one.ranges)
    fixed: dict[str, Dim] = {}
    for spec in one.inputs:
        for mine, dim in zip(spec.shape, theirs[spec.name].shape, strict=True):
            if isinstance(mine, str) and isinstance(dim, str):
                ranges[mine] = _both(ranges.get(mine, Range()), other.range(dim))
            elif isinstance(mine, str):
                fixed[mine] = dim
    inputs, outputs = (
        tuple(
            replace(
                spec,
                shape=tuple(fixed.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.shape),
                values=_common_values(spec.values, other.values.get(spec.name)),
            )
            for spec in specs
        )
        for specs in (one.inputs, one.outputs)
    )
    return Signature(inputs, outputs, one.batch, {name: held for name, held in ranges.items() if name not in fixed})


def _both(one: Range, other: Range) -> Range:
    step = math.lcm(one.step, other.step)
    low = math.ceil(max(one.low, other.low) / step) * step
    highs = [bounds.high for bounds in (one, other) if bounds.high is not None]
    return Range(low, min(highs) // step * step if highs else None, step)


def _common_values(one: ValueRange | None, other: ValueRange | None) -> ValueRange | None:
    if one is None or other is None:
        return one or other
    lows = [values.low for values in (one, other) if values.low is not None]
    highs = [values.high for values in (one, other) if values.high is not None]
    return ValueRange(max(lows, default=None), min(highs, default=None))


def _listed(specs: Sequence[TensorSpec]) -> str:
    return ", ".join(map(str, specs))


def _packages(*models: _Model) -> tuple[str, ...]:
    held = distributions()
    engines = dict.fromkeys(["onnxruntime", *(engine_of(item.variant) for item in models)])
    return tuple(name for engine in engines for name in held.get(engine, [])[:1])
