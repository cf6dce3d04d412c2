"""Private names of PyTorch behave as :mod:`ingot.export.torch_internals` states, and no other module uses one."""

from __future__ import annotations

import ast
import copy
import importlib
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram
from torch.nn import functional

from ingot.export import torch_internals as internals
from tests.support import ROOT


class Model(nn.Module):
    """Branches on a size, so that its capture has a guard."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("table", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if x.shape[0] * 3 % 7 != 1 else x


# PyTorch warns about calls that it makes itself.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def exported() -> ExportedProgram:
    return torch.export.export(Model(), (torch.ones(4, 3),), dynamic_shapes=({0: Dim.AUTO},))


class TestTensorsAndModules:
    def test_a_version_counts_writes_in_place(self) -> None:
        tensor = torch.ones(2)
        before = internals.version(tensor)
        tensor.add_(1)
        assert internals.version(tensor) > before

    def test_own_buffers_and_parameters_are_those_that_a_module_reads(self) -> None:
        model = Model()
        internals.own_buffers(model)["table"] = torch.zeros(3)
        internals.own_parameters(model.linear)["bias"] = nn.Parameter(torch.full((3,), 7.0))
        assert model.table.sum() == 0
        assert model.linear.bias[0] == 7
        assert internals.own_parameters(model) == {}

    def test_a_row_within_vmap_is_wrapped(self) -> None:
        seen = []

        def row(x: torch.Tensor) -> torch.Tensor:
            seen.append(internals.is_functorch_wrapped(x))
            return x

        torch.vmap(row)(torch.ones(2, 3))
        assert seen == [True]
        assert not internals.is_functorch_wrapped(torch.ones(2))

    def test_fake_tensors_have_no_data_and_a_copy_mode_makes_them_of_a_module(self) -> None:
        mode = internals.FakeTensorMode()
        with mode:
            assert isinstance(torch.ones(1 << 50), internals.FakeTensor)
        with internals.FakeCopyMode(mode):
            copied = copy.deepcopy(Model())
        assert isinstance(copied.linear.weight, internals.FakeTensor)

    def test_a_dispatch_mode_sees_each_operator(self) -> None:
        class Watch(internals.TorchDispatchMode):  # type: ignore[no-untyped-call]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(func)
                return func(*args, **(kwargs or {}))

        seen: list[Any] = []
        with Watch():  # type: ignore[no-untyped-call]
            torch.ones(2).neg()
        assert torch.ops.aten.neg.default in seen

    def test_a_tree_is_flattened_with_paths(self) -> None:
        paths, structure = internals.pytree.tree_flatten_with_path({"a": [1, (2,)]})
        assert [(internals.pytree.keystr(path), leaf) for path, leaf in paths] == [("['a'][0]", 1), ("['a'][1][0]", 2)]
        assert internals.pytree.tree_unflatten([3, 4], structure) == {"a": [3, (4,)]}


class TestOperators:
    def test_a_schema_names_the_arguments_with_their_defaults_and_aliases(self) -> None:
        add = internals.schema(torch.ops.aten.add_.Tensor)
        assert isinstance(torch.ops.aten.add_.Tensor, internals.OpOverload)
        assert add.name == "aten::add_"
        assert [item.name for item in add.arguments] == ["self", "other", "alpha"]
        assert add.arguments[2].default_value == 1
        alias = add.arguments[0].alias_info
        assert alias is not None
        assert alias.is_write

    def test_a_schema_is_parsed(self) -> None:
        made = internals.parse_schema("tests::f(Tensor x, float eps) -> (Tensor, Tensor)")
        assert [str(item.type) for item in made.arguments] == ["Tensor", "float"]
        assert len(made.returns) == 2
        with pytest.raises(RuntimeError):
            internals.parse_schema("f(")

    def test_kernels_are_known_by_device(self) -> None:
        assert internals.has_kernel("aten::_softmax", "cpu")
        assert not internals.has_kernel("aten::mkldnn_linear", "cuda")

    def test_the_body_of_an_operator_of_python_is_known(self) -> None:
        def body(x: torch.Tensor) -> torch.Tensor:
            return x + 1

        operator = torch.library.custom_op("internals::body", body, mutates_args=())
        assert internals.python_body("internals::body") is body
        assert internals.python_body("aten::add") is None
        del operator

    def test_a_branch_is_an_operator_of_higher_order(self) -> None:
        assert isinstance(torch.ops.higher_order.cond, internals.HigherOrderOperator)


class TestPrograms:
    def test_an_erased_node_is_recognized(self) -> None:
        graph = fx.Graph()
        node = graph.placeholder("x")
        assert not internals.is_erased(node)
        graph.erase_node(node)
        assert internals.is_erased(node)

    @pytest.mark.matrix
    def test_arguments_by_position_are_counted(self, exported: ExportedProgram) -> None:
        module = exported.module()
        assert isinstance(module, fx.GraphModule)
        assert internals.positional_arguments(module.graph) == 1
        assert internals.positional_arguments(fx.symbolic_trace(Model().linear).graph) == 0

    def test_guards_are_conditions_on_sizes(self, exported: ExportedProgram) -> None:
        (guard,) = [code for code in internals.shape_guards(exported) if "%" in code]
        assert "L['x'].size()[0]" in guard

    def test_a_copied_graph_shares_the_weights(self, exported: ExportedProgram) -> None:
        copied = internals.with_copied_graph(exported)
        assert copied.graph is not exported.graph
        assert str(copied.graph) == str(exported.graph)
        assert copied.state_dict["linear.weight"] is exported.state_dict["linear.weight"]

    def test_a_draft_reports_what_it_met(self) -> None:
        class Decides(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + 1 if x.sum().item() > 0 else x

        report = internals.draft_report(torch.export.draft_export(Decides(), (torch.ones(3),)))
        assert [item.failure_type.name for item in report.failures] == ["DATA_DEPENDENT_ERROR"]
        assert {"expr", "user_stack", "symbol_to_sources", "frame_locals"} <= set(report.failures[0].data)
        assert report.str_to_filename

    def test_bounds_and_expressions_of_sizes(self) -> None:
        free = torch.export.export(Model().linear, (torch.ones(4, 3),), dynamic_shapes=({0: Dim("rows")},))
        (bounds,) = free.range_constraints.values()
        assert internals.is_unbounded(bounds.upper)
        assert not internals.is_unbounded(bounds.lower)
        rows = sympy.Symbol("rows", integer=True)
        assert eval(internals.python_code(rows % 3 + rows // 2), {"rows": 11, "math": math}) == 7


class TestCapture:
    def test_a_declared_dimension_that_the_code_fixes_is_a_violated_constraint(self) -> None:
        class Fixed(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x.reshape(4, 3) + 1

        with pytest.raises(internals.user_error()) as caught:
            torch.export.export(Fixed(), (torch.ones(4, 3),), dynamic_shapes=({0: Dim("rows")},))
        assert internals.violates_constraints(caught.value)
        assert not internals.violates_constraints(ValueError())

    def test_a_size_of_1_stays_dynamic_if_asked(self) -> None:
        with internals.size_oblivious():
            made = torch.export.export(Model().linear, (torch.ones(1, 3),), dynamic_shapes=({0: Dim.DYNAMIC},))
        (node,) = made.graph.find_nodes(op="placeholder", target="input")
        assert isinstance(node.meta["val"].shape[0], torch.SymInt)

    def test_a_comparison_of_a_size_takes_the_side_of_the_example_and_limits_no_size(self) -> None:
        class Cuts(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x[:2] if x.shape[0] > 2 else x

        with internals.open_comparisons() as comparisons:
            made = torch.export.export(Cuts(), (torch.ones(4, 3),), dynamic_shapes=({0: Dim("rows")},))
        (comparison,) = comparisons
        assert comparison.rel_op == ">"
        assert not comparison.subs(dict.fromkeys(comparison.free_symbols, 2))
        assert made.graph.find_nodes(op="call_function", target=torch.ops.aten.slice.Tensor)

    def test_values_of_small_constants_are_known_if_asked(self) -> None:
        class Decides(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x + 1 if bool((torch.tensor([1, 2, 3] * 10) > 0).all()) else x

        with pytest.raises(Exception, match="data-dependent"):
            torch.export.export(Decides(), (torch.ones(3),))
        with internals.constants_of(64):
            torch.export.export(Decides(), (torch.ones(3),))

    def test_an_idle_conversion_keeps_the_parameters(self) -> None:
        class Router(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(3, 3)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.linear.to(x.dtype)(x)  # type: ignore[no-any-return]

        with internals.idle_conversions():
            made = torch.export.export(Router(), (torch.ones(2, 3),))
            assert nn.Linear(2, 2).to(torch.float64).weight.dtype is torch.float64
        assert set(made.state_dict) == {"linear.weight", "linear.bias"}

    @pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
    def test_recurrent_layers_call_the_replaced_functions(self, kind: Any) -> None:
        names = []

        class Replaced:
            def __init__(self, original: Any):
                self._original = original

            def __getattr__(self, name: str) -> Any:
                names.append(name)
                return getattr(self._original, name)

        layer, x = kind(3, 4), torch.ones(2, 5, 3)
        with internals.recurrent_functions(Replaced):
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 5]), batch_first=True)
            layer(x)
        expected = {nn.LSTM: "lstm", nn.GRU: "gru", nn.RNN: "rnn_tanh"}[kind]
        assert names == ["_pack_padded_sequence", expected]
        assert callable(internals.recurrent_function(expected))
        layer(packed)
        assert len(names) == 2

    def test_a_check_becomes_a_bound(self) -> None:
        class Checked(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                size: Any = x[0].item()
                internals.check(size >= 2)
                internals.check(size <= 9)
                return torch.ones(size)

        made = torch.export.export(Checked(), (torch.tensor([4]),))
        assert [(int(item.lower), int(item.upper)) for item in made.range_constraints.values()] == [(2, 9)]


def test_the_exporter_of_torchscript_prints_no_graph_when_it_fails(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.airy_ai(x)  # type: ignore[no-any-return]

    def export() -> None:
        with pytest.raises(Exception, match="airy"):
            torch.onnx.export(Fails(), (torch.ones(3),), tmp_path / "unwritten.onnx", dynamo=False)

    export()
    assert "airy" in capfd.readouterr().out
    with internals.without_onnx_log():
        export()
    assert "airy" not in capfd.readouterr().out


class TestOnnx:
    @pytest.mark.matrix
    def test_a_program_is_translated_with_a_registry_made_once(self, exported: ExportedProgram) -> None:
        own = internals.registry(internals.default_opset(), own=True)
        model = internals.export_onnx(exported, own)
        internals.name_values(model, ["rows"], ["result"])
        assert [value.name for value in model.graph.inputs] == ["rows"]
        assert [value.name for value in model.graph.outputs] == ["result"]
        assert model.opset_imports[""] == internals.default_opset()
        assert {node.op_type for node in model.graph} == {"Gemm"}

    def test_floats_of_sizes_are_double_during_an_export_only(self) -> None:
        types = importlib.import_module("torch.onnx._internal.fx.type_utils")
        with internals.precise_numbers(lambda graph: None):
            assert types.from_scalar_type_to_torch_dtype(torch.SymFloat) is torch.float64
        assert types.from_scalar_type_to_torch_dtype(torch.SymFloat) is torch.float32

    def test_functions_of_sizes_are_those_of_the_math_module(self) -> None:
        for name, function in internals.SIZE_FUNCTIONS.items():
            assert function(0.5) == getattr(math, name)(0.5)

    @pytest.mark.matrix
    def test_operators_without_translation_are_known(self, exported: ExportedProgram) -> None:
        own, none = (internals.registry(18, own=own) for own in (True, False))
        for prepared in (True, False):
            graph = internals.decomposed(exported, own, prepared=prepared).graph
            calls = [node for node in graph.nodes if node.op == "call_function"]
            assert calls
            assert all(internals.has_translation(node, own) for node in calls)
            assert not any(internals.has_translation(node, none) for node in calls)

    def test_a_program_is_decomposed_as_without_the_shorter_preparation(self, exported: ExportedProgram) -> None:
        programs: Any = importlib.import_module("torch.export.exported_program")
        before = [list(programs._BACKEND_KEYS_TO_OVERRIDE), list(programs._AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE)]
        own = internals.registry(internals.default_opset(), own=True)
        fx_passes: Any = importlib.import_module("torch.onnx._internal.exporter._fx_passes")
        expected = fx_passes.decompose_with_registry(copy.deepcopy(exported), own)
        fx_passes.remove_assertion_nodes(expected.graph_module)
        assert [n.target for n in internals.decomposed(exported, own).graph.nodes] == [
            n.target for n in expected.graph.nodes
        ]
        assert before == [programs._BACKEND_KEYS_TO_OVERRIDE, programs._AUTOGRAD_ALIAS_BACKEND_KEYS_TO_OVERRIDE]

    def test_an_operator_of_a_library_loaded_between_exports_is_kept(self) -> None:
        own = internals.registry(internals.default_opset(), own=True)
        internals.decomposed(torch.export.export(Model(), (torch.ones(4, 3),)), own)
        libraries: Any = torch.library
        library = libraries.Library("internals_between", "DEF")
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x + x, "CompositeImplicitAutograd")
        twice = torch.ops.internals_between.twice.default

        class Twice(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                result: torch.Tensor = twice(x)
                return result

        program = torch.export.export(Twice(), (torch.ones(3),))
        internals.register(own, twice, lambda x: x)
        assert twice in {node.target for node in internals.decomposed(program, own).graph.nodes}

    def test_a_translation_of_ones_own_is_used(self, exported: ExportedProgram) -> None:
        made = internals.registry(18, own=False)
        internals.register(made, torch.ops.aten.linear.default, lambda *args: None)
        linear = exported.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
        assert [internals.has_translation(node, made) for node in linear] == [True]
        assert made.opset_version == 18


def test_inductor_finds_a_compiler_or_reports_that_it_is_missing() -> None:
    internals.clear_inductor_caches()
    config: Any = torch._inductor.config
    with config.patch({"cpp.cxx": ("/nowhere/c++",)}):
        assert not internals.has_compiler()


@pytest.mark.skipif(not internals.has_compiler(), reason="needs a C++ compiler")
@pytest.mark.matrix
def test_a_package_is_compiled_with_options_and_read_by_the_loader(exported: ExportedProgram, tmp_path: Path) -> None:
    path = tmp_path / "model.pt2"
    options = {"aot_inductor.metadata": {"key": "value"}, "cpp.threads": 1, "cpp.march": "", "freezing": False}
    internals.compile_package(exported, str(path), {**options, "aot_inductor.precompile_headers": False})
    loader: Any = torch._C._aoti.AOTIModelPackageLoader
    assert loader.load_metadata_from_package(str(path), "model")["key"] == "value"
    (result,) = loader(str(path), "model", False, 1, -1).boxed_run([torch.ones(4, 3)])
    assert result.shape == (4, 3)


OF_THE_ALLOCATOR = ("_cuda_endAllocateToPool", "_cuda_releasePool", "_cuda_clearCublasWorkspaces")


def test_the_allocator_of_gpus_has_its_functions() -> None:
    """PyTorch for the CPU has only their declarations."""
    declared = (Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text()
    for name, arguments in zip(OF_THE_ALLOCATOR, (2, 2, 0), strict=True):
        (given,) = re.findall(rf"^def {name}\(([^)]*)\)", declared, re.MULTILINE)
        assert given.count(": ") == arguments


def private_names(path: Path) -> Iterator[str]:
    """Yield the private names of PyTorch in a file; those of operators are its public schemas."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    modules = {item.name for node in nodes if isinstance(node, ast.Import) for item in node.names}
    modules |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    if not any(name.partition(".")[0] == "torch" for name in modules):
        return
    own = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    own |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (item.name for item in node.names if is_private(item.name))
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{item.name}" for item in node.names]
            yield from (name for name in names if is_private(name))
        elif isinstance(node, ast.Constant) and re.fullmatch(r"torch(\.\w+)+", str(node.value)):
            yield from [str(node.value)] if is_private(str(node.value)) else []
        elif isinstance(node, ast.Attribute) and is_private(f"torch.{node.attr}"):
            written = ast.unparse(node)
            operator = written.startswith(("aten.", "torch.ops."))
            known = written in (f"self.{node.attr}", f"cls.{node.attr}") or node.attr in own
            others = node.attr == "_replace" or written == "os._exit"  # the former is a method of named tuples
            if not operator and not known and not others:
                yield written


def is_private(name: str) -> bool:
    first, *rest = name.split(".")
    return first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in rest)


@pytest.mark.matrix
def test_no_other_module_uses_a_private_name_of_pytorch() -> None:
    allowed = {
        "export/torch_internals.py": None,
        "runtime/engines/pytorch/aoti.py": {"torch._C", "torch._C._aoti"},
        "runtime/engines/pytorch/torch_lane.py": {"torch._C", *(f"torch._C.{name}" for name in OF_THE_ALLOCATOR)},
        "runtime/engines/sharding/sharded.py": {"torch._ops", "node.target._schema"},
        "runtime/engines/sharding/tensor_parallel.py": {"torch._ops", "torch.utils._pytree"},
    }
    found = {}
    for path in sorted((ROOT / "ingot").rglob("*.py")):
        place = path.relative_to(ROOT / "ingot").as_posix()
        names = set(private_names(path))
        if place in allowed:
            assert names, f"{place} uses none any more"
            names -= allowed[place] or names
        if names:
            found[place] = names
    assert found == {}


@pytest.mark.parametrize(
    "line",
    [
        "import torch._dynamo",
        "from torch.utils import _pytree",
        "from torch._ops import OpOverload",
        "config = 'torch.fx.experimental._config'",
        "import torch\nfound = torch._C",
        "import torch\ndef f(x): return x._version",
    ],
)
def test_private_names_are_found(tmp_path: Path, line: str) -> None:
    path = tmp_path / "module.py"
    path.write_text(f"from torch import nn\n{line}\n")
    assert list(private_names(path))


@pytest.mark.matrix
@pytest.mark.parametrize("needed", [False, True])
def test_dynamo_knows_a_function_that_was_replaced_when_it_listed_all(
    needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rules = importlib.import_module("torch._dynamo.trace_rules")
    rules.get_torch_obj_rule_map.cache_clear()
    original = functional.max_pool2d
    with internals.without_listing(needed=needed), monkeypatch.context() as patch:
        patch.setattr(functional, "max_pool2d", nn.Identity())
        rules.get_torch_obj_rule_map()  # as torch.cond does
    assert original in rules.get_torch_obj_rule_map()


def test_the_attention_function_of_a_model_is_named() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes))
    model.set_attn_implementation("eager")
    assert internals.attention_name(model) == "eager"


def test_distances_to_keys_have_buckets() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 8, "d_kv": 8, "d_ff": 8, "num_layers": 1, "num_heads": 1, "vocab_size": 8}
    model: Any = T5ForConditionalGeneration(T5Config(**sizes))
    attention = model.get_decoder().block[0].layer[0].SelfAttention
    found = internals.distance_buckets(attention, torch.tensor([5, 0, -1, -15, -1000]))
    assert found.tolist() == [0, 0, 1, 15, 31]
