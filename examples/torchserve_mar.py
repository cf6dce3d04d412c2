"""A model of TorchServe, moved to Ingot: make a ``.mar``, import it, serve it, ask it.

    python -m examples.torchserve_mar

The archive is what ``torch-model-archiver --model-name digits --version 1.0 --serialized-file digits.pt
--handler base_handler`` writes: a zip of a TorchScript file and a manifest. With your own archive, begin at
``import_model``.
"""

import json
import zipfile

import torch

import ingot
from ingot.demo import load, predict, train


def main() -> None:
    """Run all steps in the current folder, and compare the answers with PyTorch's."""
    training, held_out = load()
    net = train(training, epochs=2)
    torch.jit.trace(net, torch.zeros(2, 1, 8, 8)).save("digits.pt")  # type: ignore[no-untyped-call]
    manifest = {
        "runtime": "python",
        "archiverVersion": "0.12.0",
        "model": {
            "modelName": "digits",
            "modelVersion": "1.0",
            "serializedFile": "digits.pt",
            "handler": "base_handler",
        },
    }
    with zipfile.ZipFile("digits.mar", "w") as file:
        file.write("digits.pt")
        file.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))

    # TorchScript is code, which the import runs. The archive does not describe the inputs.
    archive = ingot.import_model("digits.mar", allow_code=True, inputs="image:float32[batch,1,8,8]")
    for note in archive.variant().serving.provenance.notes:
        print("note:", note)
    with ingot.serve(archive, http_port=0, grpc_port=0) as server, ingot.Client(server.http_url) as client:
        # This handler only passes tensors on; image_classifier becomes steps, and clients send files.
        (answer,) = client.infer("digits", {"image": held_out.images}).values()
    same = (answer.argmax(1) == predict(net, held_out.images)).sum()
    print(f"{same} of {len(answer)} answers are those of PyTorch")


if __name__ == "__main__":
    main()
