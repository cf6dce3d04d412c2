"""Generate the Python modules of the schemas in protos/ (``make protos``).

Each module gets a private descriptor pool: tritonclient and kserve register the same messages in the default pool, and
a second registration raises "duplicate symbol" when two of them are imported in one process.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent.parent
MODULES = {
    "open_inference": "ingot/protocol",
    "triton_config": "ingot/importing",
    "torchserve_inference": "ingot/server/torchserve",
    "torchserve_management": "ingot/server/torchserve",
}


def main() -> None:
    """Run protoc and give its output a private pool."""
    for name, folder in MODULES.items():
        out = ROOT / folder
        if protoc.main(["protoc", f"-I{ROOT / 'protos'}", f"--python_out={out}", f"--pyi_out={out}", f"{name}.proto"]):
            sys.exit("protoc failed")
        stubs = out / f"{name}_pb2.py"
        text = stubs.read_text()
        shared = "_descriptor_pool.Default()"
        if text.count(shared) != 1:
            sys.exit(f"the generated code mentions {shared} {text.count(shared)} times; once was expected")
        stubs.write_text(text.replace(shared, "_descriptor_pool.DescriptorPool()"))


if __name__ == "__main__":
    main()
