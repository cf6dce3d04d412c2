"""A PyTorch program of one input behind the methods of ``arguments.Engine``; tensors are raw bytes in both ways."""

import os

import torch
from torch.export.passes import move_to_device_pass


class Program:
    """The model of ``benchmarks.gpu`` on the device ``BENCHMARK_DEVICE``."""

    def __init__(self, path):
        program = torch.export.load(path)
        (example,), _ = program.example_inputs
        self.dtype, self.shape = example.dtype, example.shape[1:]
        self.device = os.environ["BENCHMARK_DEVICE"]
        self.module = move_to_device_pass(program, self.device).module()

    def of_bytes(self, body):
        return torch.frombuffer(bytearray(body), dtype=self.dtype).reshape(self.shape)

    def batch(self, samples):
        """Run samples together; return the bytes of each one's output as a row."""
        with torch.inference_mode():
            return self.module(torch.stack(samples).to(self.device)).cpu().view(torch.uint8).numpy()
