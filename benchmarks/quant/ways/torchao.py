"""PyTorch: PT2E quantization by torchao, compiled by AOTInductor with frozen weights."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.quant.models import MODELS
from benchmarks.quant.ways import CaseFolder, Run


def prepare(case: CaseFolder, folder: Path, way: str, budget: str) -> None:
    pt2e: Any = import_module("torchao.quantization.pt2e.quantize_pt2e")
    x86: Any = import_module("torchao.quantization.pt2e.quantizer.x86_inductor_quantizer")
    helpers: Any = import_module("torchao.quantization.pt2e")
    content = case.content
    module = MODELS[content["name"]]()
    module.load_state_dict(torch.load(case.path / "weights.pth", weights_only=True))
    batches = [tuple(torch.from_numpy(array) for array in batch.values()) for batch in case.calibration(32)]
    shapes = tuple(
        tuple(torch.export.Dim.AUTO if dim == "batch" else torch.export.Dim.STATIC for dim in dims)
        for dims in content["dims"]
    )
    with torch.no_grad():
        program = torch.export.export(module.eval(), batches[0], dynamic_shapes=shapes, strict=True).module()
        quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
        prepared = pt2e.prepare_pt2e(program, quantizer)
        for batch in batches:
            prepared(*batch)
        converted = pt2e.convert_pt2e(prepared)
        helpers.move_exported_model_to_eval(converted)
        final = torch.export.export(converted, batches[0], dynamic_shapes=shapes)
        torch._inductor.aoti_compile_and_package(
            final, package_path=str(folder / "model.pt2"), inductor_configs={"freezing": True}
        )


def load(case: CaseFolder, folder: Path, way: str, threads: int) -> Run:
    torch.set_num_threads(threads)
    model: Any = torch._inductor.aoti_load_package(str(folder / "model.pt2"))

    def run(inputs: Any) -> list[Any]:
        with torch.no_grad():
            found = model(*(torch.from_numpy(array) for array in inputs.values()))
        return [tensor.numpy() for tensor in (found if isinstance(found, list | tuple) else [found])]

    return run
