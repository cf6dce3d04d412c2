"""From a module to a captured graph, proved at sizes that its own conditions exclude too."""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx, nn

from ingot import foreign
from ingot.errors import ExportError, InvalidArgument, ParityError
from ingot.export import arguments
from ingot.export.capture import assumptions, counterexamples, exported, functions, routes
from ingot.export.explain import differing
from ingot.export.graphs import fx as fx_graphs
from ingot.export.program import Captured, Program
from ingot.export.proof import states
from ingot.export.proof.examples import LARGEST
from ingot.export.proof.parity import TOLERANCE
from ingot.export.report import Attempt
from ingot.export.source.subject import Subject
from ingot.export.stages.context import Context
from ingot.export.torch_internals import violates_constraints
from ingot.model_store import ParityEvidence
from ingot.tensors import DType, Range, TensorSpec

# MAP_NORESERVE of Linux, which Python names from 3.13 on.
_NORESERVE = 0x4000
# Elements in the inputs of the largest example to compare at.
_LARGEST_EXAMPLE = 1 << 26
# The largest number in a graph past which sizes are tried, in steps, and the most numbers of a dimension.
_LARGEST_LITERAL = 4096
_LITERALS = 3
# The most sizes past the conditions of a graph, in addition to one for each.
_FARTHER = 12
# The most further sizes to capture at where the code compares sizes.
_SIDES = 3
_NESTED = (
    "in eval mode nn.TransformerEncoder returns 0 at the positions that a mask hides if these are at the end of each "
    "sample, and other values if not: before the export, set {}.use_nested_tensor = False"
)


def capture_module(context: Context, subject: Subject) -> routes.Captured:
    """Capture a module by the first route whose graph equals it.

    Raises:
        ExportError: no route captures it.
        ParityError: no captured graph equals it.
        InvalidArgument: an input is not a parameter of ``forward``.
    """
    journal, eager = context.journal, subject.eager
    journal.note(*subject.notes)
    journal.note(*(f"fixed in the graph: {constant}" for constant in eager.arguments.constants))
    loose = arguments.outside_parameters(eager.module, list(eager.arguments.fixed))
    journal.note(*(f"'{name}' is not a parameter of forward, whose **kwargs may ignore it" for name in loose))
    captured = _tried_in_turn(context, subject)
    if eager.caches:
        then = "computes the values at each call" if eager.refills else "contains the result"
        journal.note(f"the model fills {', '.join(eager.caches)} on its first call; the graph {then}")
    journal.note(*captured.log)
    if isinstance(captured, Program):
        journal.graphs.append(fx_graphs.of_program("FX graph as captured", captured))
        journal.note(*_unused(captured, subject))
    return captured


def _tried_in_turn(context: Context, subject: Subject) -> routes.Captured:
    options, journal = context.options, context.journal
    task = routes.Task(
        subject.eager, subject.inputs, subject.ranges, subject.example, subject.output_names, options.opset
    )
    with journal.stage("capture") as stage:

        def check(captured: routes.Captured) -> None:
            context.conditions, context.narrow = (), False  # without those of routes that failed
            if isinstance(captured, Program):  # an ONNX model is proved when it is packed
                stage.parity = prove_captured(context, captured, subject, "captured")

        try:
            tried = [attempt.route for attempt in journal.attempts]
            captured, attempts = routes.capture(task, options.capture, check, journal.progress, tried)
        except ExportError as error:
            limited = bool(context.broken) or violates_constraints(error.__cause__)
            other = _refilled(context, task, check)
            if other is None and limited and options.capture == "auto":
                other = _across(context, task, subject, check)
            explained = _explained(error, subject) if other is None else error
            if explained is not error:
                raise explained from error
            if other is None:
                raise
            captured, attempts = other
        stage.detail = attempts[-1].route
    journal.attempts.extend(attempts)
    return captured


def _refilled(
    context: Context, task: routes.Task, check: Callable[[routes.Captured], None]
) -> tuple[routes.Captured, tuple[Attempt, ...]] | None:
    """Capture a module with empty caches, which its code computes again where the size differs, or return None."""
    eager, examples = task.eager, context.examples
    if not eager.caches or eager.refills:
        return None

    def steady(captured: routes.Captured) -> None:
        check(captured)
        if (name := states.influenced_at(eager, examples, context.examples.cases(), exact=False)) is not None:
            raise ParityError(f"'{name}' depends on the sizes of an earlier call")

    eager.refills = True
    route = context.options.capture
    found = foreign.outcome(lambda: routes.capture(task, route, steady, context.journal.progress))
    eager.refills = not isinstance(found, Exception)
    return None if isinstance(found, Exception) else found


def _across(
    context: Context, task: routes.Task, subject: Subject, check: Callable[[routes.Captured], None]
) -> tuple[routes.Captured, tuple[Attempt, ...]] | None:
    """Capture the other side of conditions on sizes, which may be right on both: ``if n > 256: x = x[:, :256]``."""
    progress = context.journal.progress

    def captured_at(sizes: Mapping[str, int]) -> tuple[routes.Captured, tuple[Attempt, ...]] | None:
        beyond = replace(task, example=subject.examples.make(sizes))
        found = foreign.outcome(lambda: routes.capture(beyond, routes.CROSSED, check, progress))
        return None if isinstance(found, Exception) else found

    # The first finds the conditions, also where no other route returns a graph.
    if (found := captured_at(subject.examples.default_sizes)) is not None or not context.broken:
        return found
    largest = {dim: max(sizes[dim] for sizes in context.broken) for dim in context.broken[0]}
    return next((found for sizes in [largest, *context.broken][:_SIDES] if (found := captured_at(sizes))), None)


def _explained(error: ExportError, subject: Subject) -> ExportError:
    if isinstance(error, ParityError) and (nested := _nested(subject.eager.module)):
        return ParityError(f"{error}; {_NESTED.format(nested)}")
    if isinstance(error, ParityError) and (cause := differing.named(subject.eager.module)):
        return ParityError(f"{error}; {cause}")
    remedy = states.remedy(subject.eager, subject.examples, subject.eager.caches)
    return ExportError(f"{remedy} ({error})") if remedy else error


def prove_captured(context: Context, program: Program, subject: Subject, which: str) -> tuple[ParityEvidence, ...]:
    """Prove that a program equals the original.

    Sizes that its guards exclude are compared too, because later stages drop the guards.

    Args:
        context: keeps these sizes for the proofs of later stages.
        program: what is proved.
        subject: what was captured.
        which: names the graph in progress messages.

    Raises:
        ParityError: it differs, or cannot be compared at a declared size that its guards exclude.
    """
    context.journal.progress(f"Searching for sizes that break a condition of the {which} graph")
    assumed = assumptions.find(program.exported, subject.inputs, subject.examples.default_sizes)
    broken, undecided = counterexamples.search(assumed, subject.examples.default_sizes, subject.ranges)
    conditions = "; ".join(dict.fromkeys(item.text for item in assumed if not all(map(item.holds, broken))))
    large = [sizes for sizes in broken if _elements(subject.inputs, sizes) > _LARGEST_EXAMPLE]
    broken = [sizes for sizes in broken if sizes not in large]
    context.narrow = context.narrow or bool(broken)
    farther = _farther(context, program, subject, assumed, broken)
    context.examples = context.examples.at([*broken, *farther]).of_results(_computed(program))
    context.journal.progress(f"Proving that the {which} graph equals the model")
    graph = Captured(exported.unguarded(program.exported), program.signature, subject.eager.device)
    try:
        parity, _ = context.prove(graph, program.signature)
    except ParityError as error:
        if not broken:
            raise _at_least_two(context, graph, program, error) from error
        context.broken += [sizes for sizes in broken if sizes not in context.broken]
        raise ParityError(
            f"{error}; the captured graph is valid only where {conditions}: declare ranges within that"
        ) from error
    for sizes in large:
        _prove_beyond(context, program, subject, sizes, conditions)
    context.conditions = tuple(dict.fromkeys((*context.conditions, *(item.text for item in undecided))))
    context.search_limit = counterexamples.short(assumed)
    return parity


def _at_least_two(context: Context, graph: Captured, program: Program, error: ParityError) -> ParityError:
    """Return the error of a graph with the sizes at which the graph is right, if it is wrong at a size of 1 only.

    PyTorch captures graphs for sizes from 2 on, and records no condition for that.
    """

    def right(ranges: Mapping[str, Range]) -> bool:
        larger = replace(context, examples=context.examples.within(ranges))
        return not isinstance(foreign.outcome(lambda: larger.prove(graph, program.signature)), Exception)

    known = context.examples.ranges.items()
    ranges = {dim: replace(bounds, low=2) for dim, bounds in known if 1 in bounds and 2 in bounds}
    if not ranges or not right(ranges):
        return error
    dims = list(ranges) if len(ranges) == 1 else [dim for dim, bounds in ranges.items() if right({dim: bounds})][:1]
    declared = " and ".join(f"'{dim}=2..'" for dim in dims or ranges)
    return ParityError(
        f"{error}; the model's code treats a size of 1 in another way, and the graph is right for larger sizes: "
        f"declare {declared}, or remove the condition on the size"
    )


def _computed(program: Program) -> list[DType]:
    """Return the floating-point datatypes of a program's results."""
    graphs = [part.graph for part in program.exported.graph_module.modules() if isinstance(part, fx.GraphModule)]
    results = [node.meta.get("val") for graph in graphs for node in graph.nodes if node.op == "call_function"]
    found = {result.dtype for result in results if isinstance(result, torch.Tensor)}
    return [dtype for dtype in TOLERANCE if getattr(torch, dtype.torch_name) in found]


def _prove_beyond(
    context: Context, program: Program, subject: Subject, sizes: Mapping[str, int], conditions: str
) -> None:
    """Prove that the code which a module runs at sizes too large to try equals the module at those that can be tried.

    A module may copy a tensor of more than 2**31 bytes first, for example.

    Raises:
        ParityError: it differs, or cannot be captured.
    """
    shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
    context.journal.progress(f"Capturing the graph for {shown}")
    failure = foreign.outcome(lambda: context.prove(_captured_at(program, subject, sizes), program.signature))
    if isinstance(failure, Exception):
        raise ParityError(
            f"the captured graph is valid only where {conditions}, and {shown} is too large to test without that; "
            f"declare ranges within the condition (the code for such sizes: {foreign.first_line(failure)})"
        ) from failure
    context.journal.note(
        f"{shown} is too large to run, and the model runs other code there, where not {conditions}; that code was "
        "captured too, and returns the same as the graph at the sizes that were tried"
    )


def _captured_at(program: Program, subject: Subject, sizes: Mapping[str, int]) -> Captured:
    """Capture a module at sizes for which there is no memory: a capture reads shapes only."""
    example = tuple(_unbacked(spec, sizes) for spec in subject.inputs)
    module = subject.eager.flat()
    options = {**program.options, "strict": False}  # strict mode copies the example, for which there is no memory
    with functions.dynamic(module), subject.eager.filled(subject.example):
        traced = exported.trace(module, subject.inputs, subject.ranges, example, **options)
    exported.check_scratch(traced, subject.eager.scratch)
    return Captured(exported.unguarded(traced), program.signature, subject.eager.device)


def _unbacked(spec: TensorSpec, sizes: Mapping[str, int]) -> torch.Tensor:
    """Return a tensor in memory that is reserved, and not allocated until it is touched."""
    shape = [dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape]
    dtype = getattr(torch, spec.dtype.torch_name)
    count = math.prod(shape)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    reserved = mmap.mmap(-1, max(count * dtype.itemsize, 1), flags=flags)
    return torch.frombuffer(reserved, dtype=dtype, count=count).reshape(shape)


def _farther(
    context: Context,
    program: Program,
    subject: Subject,
    assumed: Sequence[counterexamples.Assumption],
    broken: Sequence[Mapping[str, int]],
) -> list[dict[str, int]]:
    """Return further sizes past the conditions of a program and past the numbers in it, as far as they take little."""
    default = subject.examples.default_sizes
    numbers: dict[str, list[tuple[str, int]]] = {dim: [] for dim in default}
    for dim, number in assumptions.literals(program.exported, subject.inputs):
        step = subject.examples.ranges[dim].step
        if LARGEST * step < number + number // 2 and number <= _LARGEST_LITERAL * step:  # smaller ones are tried anyway
            numbers[dim].append((dim, number))
    chosen = [item for found in numbers.values() for item in found[:_LITERALS]]
    ranges = subject.examples.ranges
    farther = [
        *counterexamples.beyond(assumed, broken, default, ranges)[:_FARTHER],
        *counterexamples.past(chosen, default, ranges),
    ]
    small = (sizes for sizes in farther if _elements(subject.inputs, sizes) <= _LARGEST_EXAMPLE)
    return [sizes for sizes in small if context.examples.affordable(sizes)]


def _nested(module: nn.Module) -> str:
    """Return the path of an encoder that drops the positions that a mask hides, such as ``model.encoder``."""
    parts = module.named_modules(prefix="model")
    return next(
        (path for path, part in parts if isinstance(part, nn.TransformerEncoder) and part.use_nested_tensor), ""
    )


def _elements(inputs: Sequence[TensorSpec], sizes: Mapping[str, int]) -> int:
    return sum(math.prod(dim if isinstance(dim, int) else sizes[dim] for dim in spec.shape) for spec in inputs)


def _unused(program: Program, subject: Subject) -> Iterator[str]:
    """Yield a remark for each input that no node uses.

    Raises:
        InvalidArgument: such an input is not a parameter of ``forward`` either, so its name is probably wrong.
    """
    nodes = {node.name: node for node in program.exported.graph.nodes}
    for spec, node_name in zip(subject.inputs, program.exported.graph_signature.user_inputs, strict=True):
        if nodes[str(node_name)].users:
            continue
        if arguments.outside_parameters(subject.eager.module, [spec.name]):
            known = ", ".join(arguments.parameters(subject.eager.module))
            raise InvalidArgument(
                f"the model ignores the input '{spec.name}': forward has no such parameter; its parameters are {known}"
            )
        yield f"nothing depends on the input '{spec.name}'"
