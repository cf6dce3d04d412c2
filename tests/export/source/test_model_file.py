from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ingot.errors import InvalidArgument
from ingot.export.source import load_model_file

CODE = """
from dataclasses import dataclass
import torch
from torch.nn import Linear
from width_of_net import width

@dataclass
class Options:
    width: int = width

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = Linear(Options().width, 2)
"""


@pytest.fixture(autouse=True)
def path_as_before() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before


def written(folder: Path, code: str = CODE, width: int = 3) -> tuple[Path, Path]:
    (folder / "width_of_net.py").write_text(f"width = {width}\n")
    (folder / "net.py").write_text(code)
    torch.save(torch.nn.ModuleDict({"layer": torch.nn.Linear(3, 2)}).state_dict(), folder / "net.pth")
    return folder / "net.py", folder / "net.pth"


def test_a_class_with_its_weights_and_what_it_imports(tmp_path: Path) -> None:
    code, weights = written(tmp_path)
    module = load_model_file(code, weights)
    assert type(module).__name__ == "Net"
    assert torch.equal(module.state_dict()["layer.weight"], torch.load(weights)["layer.weight"])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import torch\n", "net.py must define one subclass of torch.nn.Module, .* and defines: none"),
        (CODE + "class Other(Net): pass\n", "and defines: Net, Other"),
        ("import no_such_package", "running net.py failed: ModuleNotFoundError: No module named 'no_such_package'"),
        ("class", "running net.py failed: SyntaxError"),
        (CODE.replace("(self)", "(self, depth)"), r"calling Net\(depth\) without arguments failed: TypeError"),
        (CODE.replace("layer", "other"), "the checkpoint .*net.pth does not fit Net: .*Missing key"),
    ],
)
def test_code_that_does_not_do(tmp_path: Path, code: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        load_model_file(*written(tmp_path, code))
