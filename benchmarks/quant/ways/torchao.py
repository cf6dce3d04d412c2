"""PyTorch: PT2E quantization by torchao, compiled by AOTInductor with frozen weights.

There is one package for each batch size: with a dynamic batch, PyTorch 2.13 compiles quantized convolutions that give
wrong answers.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.quant.models import MODELS
from benchmarks.quant.ways import BATCHES, CaseFolder, Run


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
        for rows in BATCHES:
            final = torch.export.export(converted, tuple(tensor[:rows] for tensor in batches[0]))
            torch._inductor.aoti_compile_and_package(
                final, package_path=str(folder / f"model-{rows}.pt2"), inductor_configs={"freezing": True}
            )


def load(case: CaseFolder, folder: Path, way: str, threads: int) -> Run:
    torch.set_num_threads(threads)
    models: dict[int, Any] = {
        rows: torch._inductor.aoti_load_package(str(folder / f"model-{rows}.pt2")) for rows in BATCHES
    }

    def run(inputs: Any) -> list[Any]:
        rows = len(next(iter(inputs.values())))
        fitting = next(size for size in BATCHES if size >= rows)
        # Only the last batch of the held-out data has a size without a package.
        arrays = [
            np.resize(array, (fitting, *array.shape[1:])) if fitting > rows else array for array in inputs.values()
        ]
        with torch.no_grad():
            found = models[fitting](*(torch.from_numpy(array) for array in arrays))
        return [tensor.numpy()[:rows] for tensor in (found if isinstance(found, list | tuple) else [found])]

    return run
