"""Programs that are divided, in each process of a group: ``torchrun -m tests.runtime.engines.sharded_cases FOLDER``.

The first process prints the largest error of each case, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import nn

from ingot.export.lower import program as lower_program
from ingot.model_store.format.manifest import Division
from ingot.runtime.engines.sharding import sharded
from ingot.tensors import Array, Range
from tests.export import decoders
from tests.export.programs import Returning, capture


class Mixed(nn.Module):
    """Operators for which divided values have to be whole: random ones, a condition, sorting; and one in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.order = torch.arange(15, -1, -1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.up(x)
        z = torch.relu_(y + 1)
        z[:, 3] += 1
        chosen = torch.cond(z.sum() > 0, lambda v: v * 2, lambda v: v - 1, (z,))
        noise = torch.rand_like(z) * 0
        return {
            "sorted": z.sort(-1).values,
            "picked": z[:, self.order],
            "best": z.argmax(-1),
            "down": self.down(chosen + noise),
            "norm": torch.linalg.vector_norm(z, dim=-1),
            "count": torch.zeros(x.shape[0]) + z.shape[1],
        }


def one_head() -> nn.Module:
    torch.manual_seed(0)
    return decoders.Decoder(heads=1)


def mixed() -> nn.Module:
    torch.manual_seed(0)
    return Mixed()


CASES: Mapping[str, tuple[Callable[[], nn.Module], str, Mapping[str, Division]]] = {
    "decoder": (decoders.make, decoders.INPUT, decoders.PLAN),
    "decoder in stages": (decoders.make, decoders.INPUT, {}),
    "one head": (one_head, decoders.INPUT, decoders.PLAN),
    "mixed": (mixed, "x:float32[batch,8]", {"up": "colwise", "down": "rowwise"}),
    "mixed in stages": (mixed, "x:float32[batch,8]", {}),
    "weights in stages": (Returning, "x:float32[batch=2..64,3]", {}),
}


def follow(engine: sharded.ShardedEngine, feeds: Mapping[str, Array]) -> None:
    """Take part in one call; stages get the parts of the batch one after the other."""
    values = [torch.from_numpy(feeds[spec.name]) for spec in engine.signature.inputs]
    for _ in engine._parts(values) if engine._pipeline is not None else [values]:
        engine._follow_call()


def main() -> None:
    folder, rank, count = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sharded.join(str(folder / "store"), rank, count, "cpu")
    errors: dict[str, float] = {}
    for name, (make, inputs, plan) in CASES.items():
        model = make().eval()
        path = folder / f"{rank}.pt2"
        case = capture(model, inputs)
        lower_program.lower(case.program, path)
        engine = sharded.ShardedEngine(path, device="cpu", threads=1, precision="f32", plan=plan, batchable=True)
        ranges = case.program.signature.ranges
        least = {dim: ranges.get(dim, Range()).nearest(1) for dim in case.examples.default_sizes}
        for sizes in (case.examples.default_sizes, least):
            feeds = case.examples.make(sizes)
            if rank:
                follow(engine, feeds)
                continue
            outputs, expected = engine.run(feeds), case.eager.run(feeds)
            for key, value in expected.items():
                error = float(np.abs(outputs[key].astype(np.float64) - value).max(initial=0))
                errors[name] = max(errors.get(name, 0.0), error)
    torch.distributed.barrier()  # until all messages have arrived
    if rank == 0:
        print(json.dumps(errors))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
