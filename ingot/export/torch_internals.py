"""Every private name of PyTorch that Ingot uses, each with its upstream source.

A PyTorch release may change any of them without notice. Each has a test in ``tests/export/test_torch_internals.py``,
and no other module of Ingot names one, except those of :mod:`ingot.runtime.engines` that load compiled packages,
capture CUDA graphs and divide programs: the runtime does not import the export. Dynamo, Inductor and the ONNX exporter
take seconds to import, so they are imported where they are called.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import fx, nn

# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_ops.py
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload

# https://github.com/pytorch/pytorch/issues/113456 asks for a public name.
from torch._subclasses.fake_tensor import FakeCopyMode as FakeCopyMode
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.nn.modules import rnn
from torch.nn.utils import rnn as packing

# https://github.com/pytorch/pytorch/issues/65761 asks for a public name of the second.
from torch.utils import _device, _pytree

# Documented in "Extending PyTorch", but importable from here only: https://github.com/pytorch/pytorch/pull/102087
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

if TYPE_CHECKING:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

pytree = _pytree
FunctionSchema: TypeAlias = torch._C.FunctionSchema
Registry: TypeAlias = "ONNXRegistry"
"""The ONNX exporter's translations, by operator."""

# States a condition on values for torch.export: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/__init__.py
check: Callable[[bool], None] = torch._check


# Tensors and modules


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/autograd/python_variable.cpp
def version(tensor: torch.Tensor) -> int:
    """Return a counter that each write to a tensor in place increases."""
    return tensor._version


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/__init__.py
def forget_compiled() -> None:
    """Forget what torch.cond has compiled: after a run under a dispatch mode, torch.export fails on that."""
    if "torch._dynamo" in sys.modules:  # otherwise it has compiled nothing, and takes seconds to import
        torch._dynamo.reset()


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/trace_rules.py
@contextlib.contextmanager
def without_listing(*, needed: bool) -> Iterator[None]:
    """Keep functions that the block replaces out of Dynamo's list of PyTorch's functions, which it fills on first use.

    ``needed`` is whether the block uses the list, which is then filled before. Otherwise a list that the block fills is
    dropped at the end.
    """
    name = "torch._dynamo.trace_rules"
    if needed:
        importlib.import_module(name).get_torch_obj_rule_map()
    before = name in sys.modules and sys.modules[name].get_torch_obj_rule_map.cache_info().currsize
    try:
        yield
    finally:
        if not before and name in sys.modules:
            sys.modules[name].clear_lru_cache()


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/_device.py
def remember_constructors() -> None:
    """Fill PyTorch's cache of the functions that ``with torch.device(...)`` applies to."""
    _device._device_constructors()


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/Storage.cpp
def memory(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's memory, which its views share; fake tensors have no address."""
    return int(tensor.untyped_storage()._cdata)


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/nn/modules/module.py
def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the dict in which a module itself, without its submodules, keeps its buffers."""
    return module._buffers


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict in which a module itself keeps its parameters; see :func:`own_buffers`."""
    return module._parameters


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_C/_functorch.pyi
def is_functorch_wrapped(tensor: torch.Tensor) -> bool:
    """Return whether a tensor stands for one row within ``torch.vmap``, and so has no values."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


# Operators


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_ops.py
def schema(operator: OpOverload[..., Any]) -> FunctionSchema:
    """Return an operator's name, arguments and results."""
    return operator._schema


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/jit/frontend/function_schema_parser.h
def parse_schema(text: str) -> FunctionSchema:
    """Parse the text form of a schema. Raises RuntimeError if it is malformed."""
    return torch._C.parse_schema(text)


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/csrc/utils/python_dispatch.cpp
def has_kernel(name: str, device: str) -> bool:
    """Return whether an operator such as ``acme::norm`` has its own kernel for a device."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, device.upper())


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_library/custom_ops.py
def python_body(name: str) -> Callable[..., Any] | None:
    """Return the function behind an operator of ``torch.library.custom_op``, or None for any other."""
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(name)
    return None if definition is None else definition._init_fn


# FX graphs and exported programs


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/fx/graph.py (``Graph.erase_node``)
def is_erased(node: fx.Node) -> bool:
    """Return whether a node was removed from its graph."""
    return node._erased


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/fx/graph.py (``_PyTreeCodeGen``)
def positional_arguments(graph: fx.Graph) -> int:
    """Return how many arguments the graph of an exported program takes by position; 0 for any other graph."""
    info = getattr(graph._codegen, "pytree_info", None)
    return 0 if info is None else int(info.in_spec.child(0).num_children)


# https://github.com/pytorch/pytorch/pull/161178
def shape_guards(exported: torch.export.ExportedProgram) -> list[str]:
    """Return the conditions on sizes that a program was captured under, as Python expressions."""
    return exported._guards_code


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/export/exported_program.py
def with_copied_graph(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Return a program with a copy of the graph and the same weights."""
    return exported._update(copy.deepcopy(exported.graph_module), exported.graph_signature)


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/export/_draft_export.py
def draft_report(exported: torch.export.ExportedProgram) -> Any:
    """Return the report of ``torch.export.draft_export``."""
    return exported._report  # type: ignore[attr-defined]


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/_sympy/numbers.py
def is_unbounded(bound: Any) -> bool:
    """Return whether the bound of a size is infinite."""
    from torch.utils._sympy.numbers import int_oo

    return bool(abs(bound) == int_oo)


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/utils/_sympy/printers.py
def python_code(expression: Any) -> str:
    """Return an expression of sizes as Python."""
    from torch.utils._sympy.printers import PythonPrinter

    return PythonPrinter().doprint(expression)  # type: ignore[no-any-return]


# Capture

# Public, but without types
sym_float: Callable[[Any], Any] = torch.sym_float
sym_max: Callable[[Any, Any], Any] = torch.sym_max
sym_min: Callable[[Any, Any], Any] = torch.sym_min
broadcast_shapes: Callable[..., Any] = torch.broadcast_shapes

# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/__init__.py (``_get_sym_math_fn``)
SIZE_FUNCTIONS: dict[str, Callable[..., Any]] = {
    name: getattr(torch, f"_sym_{name}")
    for name in ("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan")
}
"""By the name of a function of Python's math module: the one that accepts a size that a capture keeps dynamic."""


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_dynamo/exc.py
def user_error() -> type[Exception]:
    """Return the exception type that ``torch.export`` raises for unsupported user code."""
    from torch._dynamo.exc import UserError

    return UserError


def violates_constraints(error: BaseException | None) -> bool:
    """Return whether a capture failed because the declared dimensions are wider than the code allows."""
    from torch._dynamo.exc import UserError, UserErrorType

    return isinstance(error, UserError) and error.error_type is UserErrorType.CONSTRAINT_VIOLATION


# https://github.com/pytorch/pytorch/issues/176349
def size_oblivious() -> contextlib.AbstractContextManager[None]:
    """Treat sizes of 0 and 1 like any other while a model is captured."""
    config: Any = importlib.import_module("torch.fx.experimental._config")
    return config.patch(backed_size_oblivious=True)  # type: ignore[no-any-return]


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/fx/experimental/symbolic_shapes.py (``ShapeEnv``)
@contextlib.contextmanager
def open_comparisons() -> Iterator[list[Any]]:
    """Let a capture take the example's side of comparisons of a size, such as ``n > 256``, and keep all sizes possible.

    Yields the list of these comparisons, as formulas of one symbol of the capture.
    """
    environment: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes").ShapeEnv
    evaluate, found = environment.evaluate_expr, []

    def evaluated(self: Any, formula: Any, *args: Any, **options: Any) -> Any:
        compares = getattr(formula, "is_Relational", False) and formula.rel_op not in ("==", "!=")
        if not compares or len(formula.free_symbols) != 1 or self._maybe_evaluate_static(formula) is not None:
            return evaluate(self, formula, *args, **options)
        with self.suppress_guards():
            side = evaluate(self, formula, *args, **options)
        if formula not in found:
            found.append(formula)
        return side

    environment.evaluate_expr = evaluated
    try:
        yield found
    finally:
        environment.evaluate_expr = evaluate


# https://github.com/pytorch/pytorch/issues/136642
@contextlib.contextmanager
def constants_of(elements: int) -> Iterator[None]:
    """Track the values of constants of up to so many elements while a model is captured, instead of 1."""
    module: Any = importlib.import_module("torch._subclasses.fake_tensor")
    before = module.CONSTANT_NUMEL_LIMIT
    module.CONSTANT_NUMEL_LIMIT = elements
    try:
        yield
    finally:
        module.CONSTANT_NUMEL_LIMIT = before


@contextlib.contextmanager
def idle_conversions() -> Iterator[None]:
    """Skip conversions of a module to the type and device that it has, which some routers do on each call.

    PyTorch would replace its parameters, which a module under capture does not allow:
    https://github.com/pytorch/pytorch/issues/153056
    """
    convert = nn.Module._apply

    def apply(self: nn.Module, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        weights = (*self.parameters(recurse), *self.buffers(recurse))
        before = [(weight.dtype, weight.device, weight.shape) for weight in weights]
        after = [(weight.dtype, weight.device, weight.shape) for weight in map(function, weights)]
        return self if before == after else convert(self, function, recurse)  # type: ignore[no-untyped-call]

    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = convert  # type: ignore[method-assign]


# https://github.com/pytorch/pytorch/blob/v2.13.0/torch/fx/_symbolic_trace.py (``Tracer.call_module``)
@contextlib.contextmanager
def caught_errors() -> Iterator[None]:
    """Let a module under capture catch an error of a submodule, as in ``try: self.layer(x) except TypeError: ...``.

    PyTorch notes each call of a submodule in a stack, and does not remove a call that raises an error.
    """
    tracer: Any = importlib.import_module("torch.fx.experimental.proxy_tensor")._ModuleStackTracer
    call = tracer.call_module

    def call_module(self: Any, *args: Any) -> Any:
        depth = len(self.module_stack)
        try:
            return call(self, *args)
        except BaseException:  # and is raised again
            while len(self.module_stack) > depth:
                self.module_stack.popitem()
            raise

    tracer.call_module = call_module
    try:
        yield
    finally:
        tracer.call_module = call


@contextlib.contextmanager
def recurrent_functions(replace: Callable[[Any], Any]) -> Iterator[None]:
    """Replace the functions that recurrent layers, and the packing of sequences, call.

    ``torch.export`` unrolls them over the example's sequence: https://github.com/pytorch/pytorch/issues/126339

    Args:
        replace: called once per module with the original functions, which are attributes of one object.
    """
    original = torch._VF
    modules: list[Any] = [rnn, packing]
    for module in modules:
        module._VF = replace(original)
    try:
        yield
    finally:
        for module in modules:
            module._VF = original


# https://github.com/pytorch/pytorch/issues/21478
def recurrent_function(name: str) -> Callable[..., Any]:
    """Return PyTorch's own ``lstm``, ``gru``, ``rnn_tanh`` or ``rnn_relu``."""
    return getattr(torch._C._VariableFunctions, name)  # type: ignore[no-any-return]


# https://github.com/pytorch/pytorch/pull/71342
@contextlib.contextmanager
def without_onnx_log() -> Iterator[None]:
    """Silence the graph that the TorchScript exporter prints when it fails; it bypasses ``sys.stdout``."""
    original = torch._C._jit_onnx_log
    torch._C._jit_onnx_log = lambda *args: None
    try:
        yield
    finally:
        torch._C._jit_onnx_log = original


# The ONNX exporter: https://github.com/pytorch/pytorch/tree/v2.13.0/torch/onnx/_internal/exporter
# torch.onnx.export reads all translations on each call, which takes longer than exporting a small model.
_DEVICES = ("CPU", "CUDA", "Meta")
_DEVICE_KEYS = ("_AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE", "_BACKEND_KEYS_TO_OVERRIDE")


def default_opset() -> int:
    """Return the operator set that PyTorch exports to by default."""
    from torch.onnx._constants import ONNX_DEFAULT_OPSET

    return ONNX_DEFAULT_OPSET


def registry(opset: int, *, own: bool) -> Registry:
    """Return a registry of PyTorch's ``own`` translations, or an empty one."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    if own:
        return ONNXRegistry.from_torchlib(opset)
    made = ONNXRegistry()
    made._opset_version = opset
    return made


def register(registry: Registry, target: Any, function: Callable[..., Any], *, is_complex: bool = False) -> None:
    """Add a translation to a registry; ``is_complex`` is one for complex tensors."""
    registry._register(target, _translation(target, function, is_complex))


@functools.lru_cache(maxsize=1024)
def _translation(target: Any, function: Callable[..., Any], is_complex: bool) -> Any:
    """Return the entry of a translation, cached because the signatures of all take longer than a small model."""
    from torch.onnx._internal.exporter._registration import OnnxDecompMeta

    return OnnxDecompMeta(function, target, None, is_custom=True, is_complex=is_complex)


def export_onnx(exported: torch.export.ExportedProgram, translations: Registry) -> Any:
    """Return a program as an ``onnx_ir.Model`` that is not optimized.

    Raises:
        Exception: of many kinds, if it cannot be translated.
    """
    from torch.onnx._internal.exporter import _core

    with _without_guards(exported), _brief_preparation():
        return _core.export(
            exported, registry=translations, opset_version=translations.opset_version, verbose=False, optimize=False
        ).model


@contextlib.contextmanager
def _without_guards(exported: torch.export.ExportedProgram) -> Iterator[None]:
    """Let a program be decomposed without its conditions on sizes, whose operations would be traced one by one.

    ONNX has no guards. Those of a model that rounds its sizes in each layer take minutes.
    """
    program: Any = exported
    guards, program._guards_code = program._guards_code, []
    try:
        yield
    finally:
        program._guards_code = guards


@contextlib.contextmanager
def _brief_preparation() -> Iterator[None]:
    """Prepare decompositions once, and only for devices of PyTorch's build: a small model takes less than this does.

    PyTorch looks up all composite operators for each library of operators, twice for each program, because a library
    could be loaded in between, and replaces their kernels for devices of ten kinds:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_export/utils.py (``_materialize_cpp_cia_ops``) and
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/export/exported_program.py (``_BACKEND_KEYS_TO_OVERRIDE``)
    """
    utils: Any = importlib.import_module("torch._export.utils")
    programs: Any = importlib.import_module("torch.export.exported_program")
    accelerator = torch.accelerator.current_accelerator()
    usual = accelerator is None or accelerator.type == "cuda"
    kept = {name: getattr(programs, name) for name in _DEVICE_KEYS}
    collect = utils._materialize_cpp_cia_ops
    collect()
    utils._materialize_cpp_cia_ops = lambda: None
    for name, keys in kept.items():
        setattr(programs, name, [key for key in keys if not usual or key.name.removeprefix("Autograd") in _DEVICES])
    try:
        yield
    finally:
        utils._materialize_cpp_cia_ops = collect
        for name, keys in kept.items():
            setattr(programs, name, keys)


@contextlib.contextmanager
def precise_numbers(prepare: Callable[[fx.GraphModule], None]) -> Iterator[None]:
    """Let the exporter keep Python floats, and those that depend on sizes, in double precision until they meet tensors.

    ``prepare`` is called with each decomposed graph before the exporter inserts conversions of types.

    The exporter makes both single:
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/onnx/_internal/fx/type_utils.py and
    https://github.com/pytorch/pytorch/blob/v2.13.0/torch/onnx/_internal/exporter/_building.py
    """
    types: Any = importlib.import_module("torch.onnx._internal.fx.type_utils")._SCALAR_TYPE_TO_TORCH_DTYPE
    building: Any = importlib.import_module("torch.onnx._internal.exporter._building")
    passes: Any = importlib.import_module("torch.onnx._internal.exporter._fx_passes")
    size_type, constants = types[torch.SymFloat], building._process_python_constants
    promote = passes.insert_type_promotion_nodes

    def precise_constants(signature: Any, inputs: dict[str, Any], known: Any, made: Any, opset: Any) -> Any:
        double = building.ir.DataType.DOUBLE
        untyped = signature.name in ("Cast", "CastLike") and not known
        if untyped or any(found.dtype is double for found in known.values()):
            for name, number in inputs.items():
                if isinstance(number, float) and signature.params_map[name].type_constraint not in known:
                    inputs[name] = building._get_or_create_constant(made, number, double, opset)
        return constants(signature, inputs, known, made, opset)

    def prepared(module: fx.GraphModule) -> None:
        prepare(module)
        named = list(module.graph.output_node().all_input_nodes)
        names = [node.name for node in named]
        promote(module)
        # An output is known by its name, which its conversion back to half precision lacks.
        for before, name, after in zip(named, names, module.graph.output_node().all_input_nodes, strict=True):
            if after is not before:
                before.name, after.name = after.name, name

    types[torch.SymFloat], building._process_python_constants = torch.float64, precise_constants
    passes.insert_type_promotion_nodes = prepared
    try:
        yield
    finally:
        types[torch.SymFloat], building._process_python_constants = size_type, constants
        passes.insert_type_promotion_nodes = promote


def name_values(model: Any, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Name the inputs and outputs of a model that :func:`export_onnx` returned."""
    from torch.onnx._internal.exporter import _ir_passes

    _ir_passes.rename_inputs(model, inputs)
    _ir_passes.rename_outputs(model, outputs)


def has_translation(node: fx.Node, translations: Registry) -> bool:
    """Return whether the exporter can translate the operator that a node calls."""
    from torch.onnx._internal.exporter import _dispatching

    return _dispatching.dispatch(node, translations)[0] is not None


def decomposed(
    exported: torch.export.ExportedProgram, translations: Registry, *, prepared: bool = False
) -> torch.export.ExportedProgram:
    """Return a program of the operators that the exporter translates.

    ``prepared`` also inserts the conversions of types that ONNX needs, as the exporter does.
    """
    from torch.onnx._internal.exporter import _core, _fx_passes

    with _without_guards(exported), _brief_preparation():
        if prepared:
            return _core._prepare_exported_program_for_export(exported, registry=translations)
        program = _fx_passes.decompose_with_registry(exported, translations)
    _fx_passes.remove_assertion_nodes(program.graph_module)
    return program


# https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/configuration_utils.py


def attention_name(model: Any) -> str:
    """Return the name of the attention function that a model of transformers calls."""
    return str(model.config._attn_implementation)


# https://github.com/huggingface/transformers/blob/v5.24.0/src/transformers/models/t5/modeling_t5.py
def distance_buckets(attention: Any, distances: torch.Tensor) -> torch.Tensor:
    """Return the rows of a decoder's ``relative_attention_bias`` for distances to keys, INT64 of any shape."""
    buckets: torch.Tensor = attention._relative_position_bucket(
        distances,
        bidirectional=False,
        num_buckets=attention.relative_attention_num_buckets,
        max_distance=attention.relative_attention_max_distance,
    )
    return buckets


# AOTInductor: https://github.com/pytorch/pytorch/blob/v2.13.0/torch/_inductor/__init__.py


def compile_package(exported: torch.export.ExportedProgram, path: str, options: dict[str, Any]) -> None:
    """Compile a program into an AOTInductor package.

    Raises:
        Exception: of many kinds, if it cannot be compiled.
    """
    from torch._inductor import aoti_compile_and_package

    aoti_compile_and_package(exported, package_path=path, inductor_configs=options)


def has_compiler() -> bool:
    """Return whether Inductor finds a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def clear_inductor_caches() -> None:
    """Make Inductor forget the files that it compiled in this process."""
    from torch._inductor.utils import clear_caches

    clear_caches()
