"""The commands of the guide to registries run, in order, against a registry and with skopeo as another reader."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.model_store.common import Layers
from ingot.model_store import Archive, BlobFolder, Store
from ingot.tensors import Array
from tests.support import ROOT, RequireTool

pytestmark = pytest.mark.matrix


class Tuned(Layers):
    """A version whose first layer was trained further."""

    def weights(self, layer: int) -> Array:
        return super().weights(layer) * np.float32(1.001 if layer == 0 else 1)


def blocks() -> str:
    page = (ROOT / "docs" / "guides" / "deploy" / "registry.md").read_text()
    return "\n".join(re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL))


def test_the_way_from_a_store_to_a_shared_registry(registry: str, require_tool: RequireTool, tmp_path: Path) -> None:
    require_tool("skopeo")
    for name, model in (("digits", Layers(30, 600, "digits")), ("digits-tuned", Tuned(30, 600, "digits"))):
        model.archive(BlobFolder.scratch()).save(tmp_path / f"{name}.ingot")
    script = blocks().replace("registry.local:5000", registry.removeprefix("oci://"))
    result = subprocess.run(
        ["bash", "-c", f"set -e -x -o pipefail\n{script}"],
        cwd=tmp_path,
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith("INGOT_")},
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "INGOT_HOME": str(tmp_path / "home"),
        },
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    first, tuned = (Archive.open(tmp_path / name).digest for name in ("digits.ingot", "digits-tuned.ingot"))
    assert Store(tmp_path / "home").tags("digits") == {"1.0.0": first, "1.1.0": tuned, "prod": tuned}
    layout = (tmp_path / "layout" / "index.json").read_text()
    assert tuned in layout
    moved = [float(size) for size in re.findall(r"^([\d.]+) MiB copied", result.stderr, re.MULTILINE)]
    assert min(moved) < 2, "the second push moved what the first had"
