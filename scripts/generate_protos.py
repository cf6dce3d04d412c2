"""Generate ingot/server/grpc/open_inference_pb2.py and .pyi from protos/open_inference.proto (``make protos``).

The stubs get a descriptor pool of their own: tritonclient and kserve register the same messages in the default pool,
and a second registration raises "duplicate symbol" when two of them are imported in one process.
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parent.parent
OUT = ROOT / "ingot" / "server" / "grpc"


def main() -> None:
    """Run protoc and give its output a private pool."""
    arguments = ["protoc", f"-I{ROOT / 'protos'}", f"--python_out={OUT}", f"--pyi_out={OUT}", "open_inference.proto"]
    if protoc.main(arguments) != 0:
        sys.exit("protoc failed")
    stubs = OUT / "open_inference_pb2.py"
    text = stubs.read_text()
    shared = "_descriptor_pool.Default()"
    if text.count(shared) != 1:
        sys.exit(f"the generated code mentions {shared} {text.count(shared)} times; once was expected")
    stubs.write_text(text.replace(shared, "_descriptor_pool.DescriptorPool()"))


if __name__ == "__main__":
    main()
