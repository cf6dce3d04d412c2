"""The integer operators that an engine actually runs: quantization that does not fuse makes models slower."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from pathlib import Path

import onnx_ir as ir

from ingot.quant.report.records import Audit
from ingot.quant.schemes.plan import EngineName
from ingot.runtime.engines.ort.ort_session import package

# Operators that compute in integers.
_INTEGER = frozenset(
    {
        *("QLinearConv", "QLinearMatMul", "QGemm", "QLinearAdd", "QLinearMul", "QLinearAveragePool", "QLinearConcat"),
        *("QLinearGlobalAveragePool", "QLinearLeakyRelu", "QLinearSigmoid", "QLinearSoftmax", "QLinearReduceMean"),
        *("ConvInteger", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"),
        *("MatMulNBits", "QAttention", "QLinearWhere"),
    }
)
# The conversions between integers and floats; a float operator between two of them was meant to be an integer one.
_INTO, _OUT = "QuantizeLinear", "DequantizeLinear"


def audit(path: Path, engine: EngineName = "onnxruntime") -> Audit:
    """Return the operators that an engine computes in integers, and the float operators between them.

    Args:
        path: the quantized graph, with its weights in the same folder.
        engine: the engine that runs it. OpenVINO only reports the integer operators, not those between them.
    """
    if engine == "openvino":
        return Audit(quantized=dict(sorted(_openvino(path).items())))
    model = _optimized(path)
    integers = Counter(node.op_type for node in model.graph if node.op_type in _INTEGER)
    left = tuple(f"{node.op_type} {_name(node)}" for node in model.graph if _between(node))
    return Audit(quantized=dict(sorted(integers.items())), floats=left)


def _optimized(path: Path) -> ir.Model:
    """Return the graph after ONNX Runtime's optimizations, without its weights."""
    ort = package()
    options = ort.SessionOptions()
    options.log_severity_level = 4
    with tempfile.TemporaryDirectory(prefix="ingot-") as folder:
        out = Path(folder) / "optimized.onnx"
        options.optimized_model_filepath = str(out)
        # Large weights are written to a file next to it, which is not read.
        options.add_session_config_entry("session.optimized_model_external_initializers_file_name", "weights.bin")
        options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        return ir.load(out)


def _openvino(path: Path) -> Counter[str]:
    """Return the layers that OpenVINO computes in 8 bits, by kind."""
    from ingot.runtime.engines.openvino import OpenVinoEngine

    computing = ("Convolution", "FullyConnected", "MatMul", "RNNSeq", "LSTMSequence")
    kinds: Counter[str] = Counter()
    with contextlib.closing(OpenVinoEngine(path)) as engine:
        for operation in engine.compiled.get_runtime_model().get_ordered_ops():
            info = operation.get_rt_info()
            kind, precision = (str(info[name].astype(str)) for name in ("layerType", "runtimePrecision"))
            if kind in computing and precision in ("u8", "i8"):
                kinds[kind] += 1
    return kinds


def _between(node: ir.Node) -> bool:
    """Return whether a node's input was dequantized and its output is quantized again."""
    if node.op_type in (_INTO, _OUT) or node.op_type in _INTEGER:
        return False
    before = any(
        value is not None and (made := value.producer()) is not None and made.op_type == _OUT for value in node.inputs
    )
    return before and any(user.op_type == _INTO for value in node.outputs for user, _ in value.uses())


def _name(node: ir.Node) -> str:
    return node.name or node.outputs[0].name or ""
