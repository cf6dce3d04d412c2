"""The capture matrix: every model kind by every route is equal to PyTorch or refused, and never silently wrong."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import get_args

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from ingot.errors import ExportError
from ingot.export import export_model
from ingot.export.capture.routes import ROUTES
from ingot.export.pipeline import Capture
from ingot.export.program import name_outputs
from ingot.model_store import Archive
from tests.export import fingerprint
from tests.export.capture.kinds import KINDS
from tests.support import matrix

SPEC = ["x:float32[batch,seq=1..64,4]"]
LADDER = {"auto", "export", "strict", "inferred", "deferred", "oblivious", "crossed"}
# Routes that refuse each kind; every other route captures it. Kinds that change their state are refused by all.
REFUSED = {
    "transformer": {"script"},
    "branch": LADDER | {"fx", "trace"},
    "cond": {"fx", "script", "trace"},
    "nested": {"script"},
    "stateful": {"auto", *ROUTES},
    "overwriting": {"auto", *ROUTES},
    "sliced": (LADDER - {"auto", "strict"}) | {"fx", "script", "trace"},
    "looped": LADDER | {"fx", "trace"},
}


def inputs() -> Iterator[torch.Tensor]:
    """Yield shapes and values that the export has not seen, on both sides of every branch."""
    for seed, shape in enumerate([(1, 1, 4), (2, 6, 4), (5, 21, 4)]):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1000 + seed))
        yield from (x, -x, x.abs() * 3)


def disagreement(archive: Archive, module: nn.Module) -> float:
    """Return the worst relative difference between an archive in plain ONNX Runtime and a module."""
    session = onnxruntime.InferenceSession(archive.variant().path())
    names = [spec.name for spec in archive.signature.outputs]
    worst = 0.0
    for x in inputs():
        with torch.no_grad():
            expected = name_outputs(copy.deepcopy(module)(x.clone()))
        for name, actual in zip(names, session.run(None, {"x": x.numpy()}), strict=True):
            want = expected[name].numpy()
            if want.shape != actual.shape:
                return float("inf")
            worst = max(
                worst, float(np.abs(want - actual).max(initial=0)) / max(1.0, float(np.abs(want).max(initial=0)))
            )
    return worst


def test_the_type_of_routes_has_each() -> None:
    assert get_args(Capture) == ("auto", *ROUTES)


@pytest.mark.matrix
@pytest.mark.parametrize("route", matrix("auto", *ROUTES))
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_equal_or_refused(kind: str, route: Capture) -> None:
    torch.manual_seed(0)
    module = KINDS[kind]().eval()
    before = fingerprint.of_module(module)
    if route in REFUSED.get(kind, ()):
        with pytest.raises(ExportError) as caught:
            export_model(module, inputs=SPEC, capture=route)
        assert len(str(caught.value)) > 40  # an explanation, not an error code
        assert fingerprint.of_module(module) == before
        return
    archive = export_model(module, inputs=SPEC, capture=route)
    assert fingerprint.of_module(module) == before
    assert disagreement(archive, module) < 1e-5
