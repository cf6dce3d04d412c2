"""Proof of a model's raw steps, such as its tokenizer: equal tensors of hard raw inputs, and equal answers."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from ingot.errors import InvalidArchive, InvalidArgument, ParityError
from ingot.export.lower.packed import Packed
from ingot.export.proof import answers
from ingot.export.proof.samples import made
from ingot.export.stages.context import Context
from ingot.export.stages.prove import Proved, load_packed
from ingot.model_store import Golden
from ingot.model_store.format.evidence import UNCONFIRMED, StepsEvidence
from ingot.runtime import Engine
from ingot.steps import Described, OpenedSteps, Original, Values
from ingot.steps.after.ctc import Ctc
from ingot.tensors import Array, DType, arrays, check_inputs

# Items that are compared at once: padding is then compared too.
_AT_ONCE = 16
# Raw goldens, and items of each.
_GOLDENS, _ITEMS = 2, 3
# Requests of samples of declared steps, of which one becomes a golden.
_TRIES = 8
# Outputs with noise, with which a golden's answers must say the same.
_NOISES = 8
_NOTHING = np.zeros(0, np.int32)


def prove_steps(context: Context, packed: Packed, proved: Proved) -> Proved:
    """Prove the steps of an export, and add goldens and evidence.

    Raises:
        ParityError: the steps make other tensors or answers than the original.
        InvalidArgument: they do not fit the graph.
    """
    described = context.options.steps
    if described is None:
        return proved
    opened = described.steps.open(lambda name: _file(described, name), proved.signature)
    original = described.original
    if original is None:
        return _recorded(context, packed, proved, opened)
    allowed = _allowed((spec.name for spec in opened.config.outputs), proved.golden_tolerance / 10)
    with context.journal.stage("steps", "Proving the steps before and after the graph") as stage:
        items, deviation = _prove_tensors(opened, original)
        evidence = StepsEvidence(
            reference=original.name, items=items, deviation=deviation, answers=0, error=0, tolerance=allowed
        )
        if not original.answers:
            stage.detail = f"tensors of {items} items equal"
            evidenced = replace(proved, evidence=proved.evidence.model_copy(update={"steps": evidence}))
            return _recorded(context, packed, evidenced, opened, original.samples)
        with contextlib.closing(load_packed(context, packed)) as engine:
            answers, error, goldens = _prove_answers(context, opened, original, engine, proved.golden_tolerance)
        equal = f"equal within {deviation:.1e}" if deviation else "equal"
        stage.detail = f"tensors of {items} items {equal}; answers of {answers} within {error:.1e}"
    evidence = evidence.model_copy(update={"answers": answers, "error": error})
    return replace(
        proved,
        goldens=(*proved.goldens, *goldens),
        evidence=proved.evidence.model_copy(update={"steps": evidence}),
    )


def _recorded(
    context: Context, packed: Packed, proved: Proved, opened: OpenedSteps, samples: Sequence[Values] = ()
) -> Proved:
    """Add goldens of declared steps, whose answers no original confirms.

    Args:
        context: the export.
        packed: the graph.
        proved: its proof.
        opened: the steps.
        samples: sets of raw inputs; by default some are made for the steps.

    Raises:
        InvalidArgument: the steps fail, or make tensors that the graph does not accept.
    """
    example, goldens = proved.goldens[0].inputs, list[Golden]()
    items = _ITEMS if proved.signature.batch is not None else _count(example)
    with (
        context.journal.stage("steps", "Running the steps before and after the graph") as stage,
        contextlib.closing(load_packed(context, packed)) as engine,
    ):
        for sample in samples or made(opened, example, _TRIES * items):
            found = sorted((_run(opened, engine, values) for values in _chunks(sample, items)), key=_says_nothing)
            goldens += itertools.islice((case for case in found if _settled(opened, case, proved.golden_tolerance)), 1)
        stage.detail = f"{len(goldens)} goldens"
    which, what = ("after", "their answers") if samples else ("before and after", "them")
    context.journal.note(
        f"the steps {which} the graph are as declared; {UNCONFIRMED} {what}"
        + (
            ""
            if goldens
            else "; no golden holds their answers, as the steps refuse all samples or scores are too close"
        )
    )
    return replace(proved, goldens=(*proved.goldens, *goldens))


def _prove_answers(
    context: Context, opened: OpenedSteps, original: Original, engine: Engine, golden_tolerance: float
) -> tuple[int, float, list[Golden]]:
    """Return how many answers were compared, their largest difference, and goldens from raw inputs to answers.

    Texts of sounds are not compared where two tokens have the same score, but for rounding.

    Raises:
        ParityError: an answer differs.
    """
    module = None if context.eager is None else context.eager.module
    count, errors, goldens, empty = 0, list[float](), list[Golden](), list[Golden]()
    each = max(1, _GOLDENS // len(original.samples))
    for kind, samples in enumerate(original.samples, 1):
        for values in _chunks(samples):
            case = _run(opened, engine, values)
            certain = _certain(opened, case, golden_tolerance / 10)
            # Calls by another library may leave traces in the module, such as hooks.
            with contextlib.nullcontext() if context.eager is None else context.eager.undone():
                wanted = original.answer(module, values)
            answers, expected = _rows(case.answers, certain), _rows(wanted, certain)
            if certain.any():
                errors.append(_error(expected, answers, golden_tolerance / 10))
            count += int(certain.sum())
            if len(goldens) < min(each * kind, _GOLDENS):
                order = np.argsort(~_telling(case.answers), kind="stable")
                for items in (_ITEMS, 1):
                    few = _steadied(opened, engine, _rows(values, order[:items]))
                    chosen = empty if _says_nothing(few) else goldens
                    if len(chosen) < _GOLDENS and _settled(opened, few, golden_tolerance):
                        chosen.append(few)
                        break
    if not count:
        raise ParityError("no answer can be compared: in all samples, tokens of a frame have the same score")
    goldens = [*goldens, *empty][:_GOLDENS]
    return count, _joined(errors, [spec.name for spec in opened.config.outputs]), goldens


def _telling(answers: Values) -> Array:
    """Return which items have an answer that is not empty, such as a text or the label of a box, bool[n]."""
    named = [array for array in answers.values() if DType.of(array) is DType.BYTES]
    if not named:
        return np.ones(_count(answers), bool)
    found: Array = np.any([[any(row.flat) for row in array[:, None]] for array in named], axis=0)
    return found


def _says_nothing(case: Golden) -> bool:
    return not _telling(case.answers).any()


def _joined(errors: Sequence[float], names: Iterable[str]) -> float:
    """Return the largest difference of all requests; of masks, the part of their pixels that differs.

    Raises:
        ParityError: that part is too large.
    """
    if "mask" not in names:
        return max(errors)
    if (error := float(np.mean(errors))) > answers.MASKS:
        raise ParityError(
            f"the answers of the steps differ from the original's: of all pixels {error:.2e} have another class, "
            f"tolerance {answers.MASKS:.0e}"
        )
    return error


def _rows(values: Values, chosen: Array) -> dict[str, Array]:
    return {name: array[chosen] for name, array in values.items()}


def _certain(opened: OpenedSteps, case: Golden, tolerance: float) -> Array:
    """Return for which items rounding cannot change the text of a sound, bool[n]; all of other tasks."""
    found = np.ones(_count(case.answers), bool)
    for step in opened.config.after:
        if isinstance(step, Ctc):
            margin = 2 * tolerance * float(np.abs(case.outputs[step.logits]).max())
            prepared = opened.prepare(case.raw) if step.sizes else {}
            found &= step.certain({**prepared, **case.outputs}, margin)
    return found


def _file(described: Described, name: str) -> bytes:
    try:
        return described.files[name]
    except KeyError:
        raise InvalidArchive(f"the steps need the file '{name}', which was not described") from None


def _count(values: Values) -> int:
    return len(next(iter(values.values())))


def _chunks(values: Values, size: int = _AT_ONCE) -> Iterator[dict[str, Array]]:
    for start in range(0, _count(values), size):
        yield {name: array[start : start + size] for name, array in values.items()}


def _prove_tensors(opened: OpenedSteps, original: Original) -> tuple[int, float]:
    """Return the number of items of which the steps make the original's tensors, and the largest difference.

    Raises:
        ParityError: a tensor differs.
    """
    count, worst = 0, 0.0
    for values in itertools.chain.from_iterable(map(_chunks, original.items)):
        count += _count(values)
        found, expected = opened.tensors(opened.prepare(values)), original.prepare(values)
        for name in found:
            if name not in expected:
                raise ParityError(
                    f"{original.name} makes no '{name}', an input of the graph: without an original, the steps cannot "
                    f"be proved; export the model without this input, or without steps (--task none)"
                )
            if (difference := _difference(found[name], expected[name])) <= original.bound:
                worst = max(worst, difference)
                continue
            shown = [item.decode(errors="replace")[:40] for item in next(iter(values.values())).tolist()]
            by = (
                f"that differs by {difference:.1e}, where the bound is {original.bound:.0e}, " if original.bound else ""
            )
            raise ParityError(f"the steps make another '{name}' than {original.name} {by}of one of these: {shown}")
    return count, worst


def _difference(found: Array, expected: Array) -> float:
    if found.shape != expected.shape:
        return float("inf")
    if np.array_equal(found, expected):
        return 0.0
    return float(np.abs(found.astype(np.float64) - expected).max())


def _error(expected: Values, given: Values, tolerance: float) -> float:
    """Return the largest difference of answers.

    Raises:
        ParityError: it exceeds the tolerance.
    """
    name, error = answers.error(expected, given, tolerance)
    allowed = answers.OF_REQUEST if name == "mask" else tolerance
    if error > allowed:
        raise ParityError(
            f"the answers of the steps differ from the original's: '{name}' departs by {error:.2e}, tolerance "
            f"{allowed:.0e}"
        )
    return error


def _allowed(names: Iterable[str], tolerance: float) -> float:
    """Return the difference that answers of these names may have."""
    return answers.MASKS if "mask" in names else tolerance


def _settled(opened: OpenedSteps, case: Golden, tolerance: float) -> bool:
    """Return whether rounding on another machine cannot change what the answers say: names, their order and number.

    The steps after the graph run on outputs with noise of twice the tolerance.
    """
    values, random = opened.prepare(case.raw), np.random.default_rng(0)

    def says(answers: Values) -> Values:
        found = opened.config.comparable(answers).items()
        return {name: array for name, array in found if not DType.of(array).is_float}

    for _ in range(_NOISES):
        noisy = {name: _noisy(array, 2 * tolerance, random) for name, array in case.outputs.items()}
        found = opened.finish(values, noisy)
        if arrays.worst_error({**says(case.answers), "": _NOTHING}, {**says(found), "": _NOTHING})[1]:
            return False
    return True


def _noisy(array: Array, amount: float, random: np.random.Generator) -> Array:
    """Return floats with noise of ``amount`` of the largest, and of 1 at least."""
    if not DType.of(array).is_float:
        return array
    scale = amount * max(1.0, float(np.abs(array).max(initial=0)))
    noisy: Array = array + (scale * random.choice([-1, 1], array.shape)).astype(array.dtype)
    return noisy


def _steadied(opened: OpenedSteps, engine: Engine, raw: dict[str, Array]) -> Golden:
    """Return the case of raw inputs, or of such that rounding changes less, as steps after the graph choose them."""
    case = _run(opened, engine, raw)
    changes = {name: array for step in opened.config.after for name, array in step.steadied(raw, case.answers).items()}
    return _run(opened, engine, {**raw, **changes}) if changes else case


def _run(opened: OpenedSteps, engine: Engine, raw: dict[str, Array]) -> Golden:
    opened.check(raw)
    prepared = opened.prepare(raw)
    try:
        inputs = opened.tensors(prepared)
        check_inputs(opened.signature, inputs)
    except InvalidArgument as error:
        raise InvalidArgument(f"the graph does not accept what the steps make of samples: {error}") from error
    outputs = engine.run(inputs)
    return Golden(inputs, outputs, raw, opened.finish(prepared, outputs))
