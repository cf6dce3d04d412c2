"""Archives of TorchServe and folders of Triton, made by hand. Readers do not run models, so a stub is enough."""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from ingot.importing import Consent, Imported, candidates
from ingot.importing.members import LIMITS, Limits

SCRIPT = ("net/constants.pkl", "net/code/__torch__.py", "net/data.pkl")
WEIGHTS = ("net/data.pkl", "net/version")
PROGRAM = ("net/models/model.json", "net/data/weights/model_weights_config.json")
COMPILED = ("net/data/aotinductor/model/model.so",)


def torch_file(*names: str) -> bytes:
    """Return a zip with the names that distinguish PyTorch's files."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        for name in names:
            file.writestr(name, b"")
    return stream.getvalue()


def manifest(**model: object) -> bytes:
    return json.dumps({"runtime": "python", "archiverVersion": "0.12.0", "model": model, "createdOn": "now"}).encode()


def mar(path: Path, files: Mapping[str, bytes], **model: object) -> Path:
    """Write an archive with these files, and a manifest of ``model`` unless one is among them."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        if "MAR-INF/MANIFEST.json" not in files:
            file.writestr("MAR-INF/MANIFEST.json", manifest(**{"modelName": "net", **model}))
        for name, content in files.items():
            file.writestr(name, content)
    return path


def script_mar(path: Path, files: Mapping[str, bytes] | None = None, **model: object) -> Path:
    """Write an archive of a TorchScript model."""
    return mar(path, {"net.pt": torch_file(*SCRIPT), **(files or {})}, **{"serializedFile": "net.pt", **model})


def tgz(path: Path, files: Mapping[str, bytes], *more: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w:gz") as file:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
        for info in more:
            file.addfile(info, io.BytesIO(b"x" * info.size))
    return path


def read(path: Path, *, allow_code: bool = True, without_handler: bool = False, limits: Limits = LIMITS) -> Imported:
    """Read the only model of a source. Unpacked files are removed when this returns."""
    with candidates(path, Consent(allow_code, without_handler), limits) as found:
        (candidate,) = found
        return candidate.read()


CONFIG = """
platform: "onnxruntime_onnx"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ]
"""


def triton(folder: Path, config: str | None = CONFIG, files: Mapping[str, bytes] | None = None) -> Path:
    """Write a model's folder, by default with the version 1 of an ONNX model."""
    for name, content in ({"1/model.onnx": b"a graph"} if files is None else files).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    folder.mkdir(parents=True, exist_ok=True)
    if config is not None:
        (folder / "config.pbtxt").write_text(config)
    return folder
