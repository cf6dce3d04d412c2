"""MNIST as in PyTorch's examples, from local IDX files: the same network and training, then export and serve.

    python -m examples.mnist FOLDER

FOLDER holds the four files of MNIST in their original form, gzipped or not: ``train-images-idx3-ubyte``,
``train-labels-idx1-ubyte``, ``t10k-images-idx3-ubyte`` and ``t10k-labels-idx1-ubyte``. Nothing is downloaded: the files
are published at yann.lecun.com/exdb/mnist, and torchvision keeps its copy in ``MNIST/raw``.
"""

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import StepLR

import ingot
from ingot.tensors import Array


class Net(nn.Module):
    """The network of PyTorch's example: log probabilities [B, 10] of images [B, 1, 28, 28]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, 1)
        self.conv2 = nn.Conv2d(32, 64, 3, 1)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(9216, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.conv1(x))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.fc1(torch.flatten(self.dropout1(x), 1)))
        return functional.log_softmax(self.fc2(self.dropout2(x)), dim=1)


class Served(nn.Module):
    """What clients call: pixels as they are, uint8 [B, 1, 28, 28]. The normalization is a part of the graph."""

    def __init__(self, net: Net):
        super().__init__()
        self.net = net

    def forward(self, image: Tensor) -> Tensor:
        return self.net(normalized(image))  # type: ignore[no-any-return]


def normalized(image: Tensor) -> Tensor:
    """Return pixels of 0 to 255 as the network's input."""
    return (image.float() / 255 - 0.1307) / 0.3081


def read_idx(folder: Path, name: str) -> Array:
    """Return the array of an IDX file of bytes: images [N, rows, columns] or labels [N]."""
    path = folder / name
    raw = path.read_bytes() if path.exists() else gzip.decompress(path.with_name(f"{name}.gz").read_bytes())
    if raw[:3] != b"\0\0\x08":
        raise SystemExit(f"{path} is not an IDX file of bytes")
    shape = np.frombuffer(raw, ">u4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def train(net: Net, images: Array, labels: Array, epochs: int) -> None:
    """Train as PyTorch's example does by default: Adadelta, batches of 64."""
    torch.manual_seed(1)
    optimizer = torch.optim.Adadelta(net.parameters(), lr=1.0)
    schedule = StepLR(optimizer, step_size=1, gamma=0.7)
    inputs, targets = normalized(torch.from_numpy(images)), torch.from_numpy(labels.astype(np.int64))
    for epoch in range(epochs):
        for batch in torch.randperm(len(inputs)).split(64):  # type: ignore[no-untyped-call]
            optimizer.zero_grad()
            functional.nll_loss(net(inputs[batch]), targets[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        schedule.step()
        print(f"epoch {epoch + 1} of {epochs}")


def main() -> None:
    """Train, export with proof, save the archive, and ask a server for all test images."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    arguments = parser.parse_args()
    images, labels, test_images, test_labels = (
        read_idx(arguments.folder, f"{part}-{kind}-ubyte")
        for part in ("train", "t10k")
        for kind in ("images-idx3", "labels-idx1")
    )
    net = Net()
    train(net, images[:, None].copy(), labels, arguments.epochs)
    archive = ingot.export_model(
        Served(net), inputs=["image:uint8[batch,1,28,28]"], output_names=["log_probabilities"], name="mnist"
    )
    archive.save("mnist.ingot")
    with ingot.serve("./mnist.ingot", http_port=0, grpc_port=0) as server, ingot.Client(server.grpc_url) as client:
        parts = np.array_split(test_images[:, None], max(len(test_images) // 100, 1))
        answers = [client.infer("mnist", {"image": part})["log_probabilities"].argmax(1) for part in parts]
    right = (np.concatenate(answers) == test_labels).mean()
    print(f"{right:.2%} of {len(test_labels)} test images are right, over gRPC")


if __name__ == "__main__":
    main()
