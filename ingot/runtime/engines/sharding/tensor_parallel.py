"""Tensor parallelism: weights that a plan divides over processes, and the computation with them as DTensors."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils import _pytree as pytree

from ingot.errors import InvalidArgument
from ingot.model_store.format.manifest import Division
from ingot.runtime.engines.sharding.collectives import OutOfStep, in_step
from ingot.runtime.machine.memory import NO_MEMORY

_ATEN = torch.ops.aten
_ATTENTION = _ATEN.scaled_dot_product_attention.default
# The dimension of the heads in an attention's inputs: batch, heads, length, width.
_HEADS = 1
# PyTorch 2.13 gathers their results in a wrong shape.
_FAILING = (_ATEN.argmax.default, _ATEN.argmin.default)


def division_of(module: str, plan: Mapping[str, Division]) -> Division | None:
    """Return how a plan divides the weights of a module; in a plan, ``*`` stands for one part of a module's name."""
    parts = module.split(".")
    for pattern, division in plan.items():
        wanted = pattern.split(".")
        if len(wanted) == len(parts) and all(map(fnmatchcase, parts, wanted)):
            return division
    return None


def divided_dim(weight: str, division: Division, *, table: bool) -> int | None:
    """Return the dimension along which a weight is divided; None if each process holds all of it.

    Args:
        weight: ``weight`` or ``bias``.
        division: of its layer.
        table: whether the layer is an embedding, whose weight is not transposed.
    """
    if weight == "bias":
        return 0 if division == "colwise" else None
    return 0 if (division == "colwise") != table else 1


def divided_weights(program: torch.export.ExportedProgram, plan: Mapping[str, Division]) -> dict[str, int]:
    """Return the dimension along which each divided weight of a program is divided, by its name in the program.

    Raises:
        InvalidArgument: the plan divides no weight of the program, or one that lacks the dimension.
    """
    inputs = program.graph_signature.inputs_to_parameters
    tables = {
        inputs[str(node.args[0])]
        for node in program.graph.find_nodes(op="call_function", target=_ATEN.embedding.default)
        if str(node.args[0]) in inputs
    }
    found = {}
    for name in program.state_dict:
        module, _, weight = name.rpartition(".")
        division = division_of(_own_name(module), plan)
        if division is not None and (dim := divided_dim(weight, division, table=name in tables)) is not None:
            if dim >= program.state_dict[name].dim():
                raise InvalidArgument(
                    f"the tensor-parallel plan divides {_own_name(name)} {division}, which is not a "
                    "matrix; export the model again"
                )
            found[name] = dim
    if not found:
        raise InvalidArgument("the tensor-parallel plan divides no weight of the model; export the model again")
    return found


def _own_name(name: str) -> str:
    """Return the name in the author's module, without those of the modules that the capture has put around it."""
    return name.replace("ingot_wrapped.", "")


def divide(program: torch.export.ExportedProgram, dims: Mapping[str, int], rank: int, count: int) -> None:
    """Replace divided weights by the part of one of ``count`` processes.

    Raises:
        InvalidArgument: a dimension cannot be divided evenly.
    """
    for name, dim in dims.items():
        size = program.state_dict[name].shape[dim]
        if size % count:
            raise InvalidArgument(
                f"dimension {dim} of {_own_name(name)} has {size} elements, which cannot be divided "
                f"evenly over {count} processes; serve it with another number of --shards, or leave the layer out of "
                "the plan"
            )
        part = program.state_dict[name].detach().chunk(count, dim)[rank].clone()
        program.state_dict[name] = nn.Parameter(part, requires_grad=False)


class DividedProgram(fx.Interpreter):
    """Runs a program whose weights are divided. All processes run it on the same inputs, with the same outputs.

    A value is a DTensor while it is divided, otherwise a plain tensor that every process has. An operator for which
    PyTorch has no rule, or which is random, gets whole values.

    Args:
        module: the program, with the weights of :func:`divide`.
        dims: of :func:`divided_weights`.
        mesh: the processes.
    """

    def __init__(self, module: fx.GraphModule, dims: Mapping[str, int], mesh: DeviceMesh):
        super().__init__(module)
        self.extra_traceback = False  # which would change the texts of errors
        self._mesh = mesh
        self._weights = {
            name: DTensor.from_local(module.get_parameter(name), mesh, [Shard(dim)], run_check=False)
            for name, dim in dims.items()
        }
        self._whole: set[fx.Node] = set()
        self._node: fx.Node

    def call(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs, whole, in every process.

        Raises:
            OutOfStep: an operator on divided values failed, or memory is lacking.
            Exception: an operator on whole values failed, in all processes.
        """
        outputs = self.run(*values)
        with in_step():
            return [self._as_whole(output) for output in outputs]

    def run_node(self, n: fx.Node) -> Any:
        self._node = n
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._weights[target] if target in self._weights else super().get_attr(target, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if not any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves((args, kwargs))):
            return self._on_whole(target, args, kwargs)
        if target is _ATEN.embedding.default and isinstance(args[0], DTensor):
            _check_indices(args[1], args[0].shape[0])
        with in_step():
            return self._on_divided(target, args, kwargs)

    @staticmethod
    def _on_whole(target: Any, args: Any, kwargs: Any) -> Any:
        try:
            return target(*args, **kwargs)
        except (MemoryError, RuntimeError) as error:  # unlike other errors, a lack of memory may be in one process only
            if isinstance(error, MemoryError | torch.OutOfMemoryError) or NO_MEMORY.search(str(error)):
                raise OutOfStep(str(error)) from error
            raise

    def _on_divided(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is _ATTENTION and _heads_divided(*args, **kwargs):
            local = pytree.tree_map(lambda value: value.to_local() if isinstance(value, DTensor) else value, args)
            return DTensor.from_local(target(*local, **kwargs), self._mesh, [Shard(_HEADS)], run_check=False)
        if self._node not in self._whole and not _needs_whole(target):
            try:
                given = pytree.tree_map(self._as_divided, (args, kwargs))
                return pytree.tree_map(_settled, target(*given[0], **given[1]))
            except (NotImplementedError, RuntimeError) as error:
                # Rules depend on sizes only, so that they are missing in all processes or in none.
                if not isinstance(error, NotImplementedError) and "Sharding propagation failed" not in str(error):
                    raise
                self._whole.add(self._node)
        given = pytree.tree_map(self._as_whole, (args, kwargs))
        return target(*given[0], **given[1])

    def _as_divided(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            return DTensor.from_local(value, self._mesh, [Replicate()], run_check=False)
        return value

    @staticmethod
    def _as_whole(value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value


def _settled(value: Any) -> Any:
    """Return a value that is not divided as a plain tensor; partial sums are added up, once for all that read them."""
    if isinstance(value, DTensor) and not isinstance(value.placements[0], Shard):
        return value.full_tensor()
    return value


def _heads_divided(
    query: Any, key: Any, value: Any, mask: torch.Tensor | None = None, dropout: float = 0.0, *_: Any, **__: Any
) -> bool:
    """Return whether an attention is divided by heads, each of which it computes separately."""
    divided = all(
        isinstance(item, DTensor) and item.placements == (Shard(_HEADS),) and item.dim() == _HEADS + 3
        for item in (query, key, value)
    )
    common = mask is None or (not isinstance(mask, DTensor) and (mask.dim() < 3 or mask.shape[-3] == 1))
    return divided and common and dropout == 0


def _needs_whole(target: Any) -> bool:
    """Return whether an operator is random, contains a graph, such as the branches of a condition, or fails divided."""
    if isinstance(target, torch._ops.HigherOrderOperator) or target in _FAILING:
        return True
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _check_indices(indices: torch.Tensor, size: int) -> None:
    """Raise IndexError as the operator does: DTensor masks the indices that another process has, and invalid ones."""
    if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < size):
        raise IndexError("index out of range in self")
