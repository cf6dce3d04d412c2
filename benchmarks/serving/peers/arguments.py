"""Arguments of every peer's server, and the model as all of them load it. Runs in each peer's own environment."""

import argparse
import contextlib
import os
import runpy
import socket

import numpy as np


def parse():
    """Return the model's file and name, ports, the format of bodies, and the settings of batches (delay in ms)."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--name")
    parser.add_argument("--port", type=int)
    parser.add_argument("--grpc-port", type=int)
    parser.add_argument("--format")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--delay", type=float)
    parser.add_argument("--capacity", type=int, help="most requests in the server, where it is to answer in time")
    parser.add_argument("--work", help="a folder for this server alone")
    return parser.parse_args()


def free_ports(count, taken):
    """Return different ports that nothing listens on, other than those taken, which a server insists on in addition."""
    with contextlib.ExitStack() as held:
        found = set()
        while len(found) < count:
            listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))
            found |= {listener.getsockname()[1]} - set(taken)
        return tuple(found)


class Engine:
    """ONNX Runtime with one thread. ``run`` takes arrays by name, with the batch; all models have one output."""

    def __init__(self, path=None):
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path = path or os.environ["BENCHMARK_MODEL"]
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.inputs = {i.name: (_DTYPES[i.type], tuple(i.shape[1:])) for i in self.session.get_inputs()}
        self.output = self.session.get_outputs()[0].name

    def run(self, arrays):
        return self.session.run([self.output], arrays)[0]

    def batch(self, samples):
        """Run samples, each a dict of arrays without the batch, together; return one row for each."""
        return self.run({name: np.stack([sample[name] for sample in samples]) for name in self.inputs})

    def of_json(self, sample):
        return {name: np.asarray(sample[name], dtype) for name, (dtype, _) in self.inputs.items()}

    def of_bytes(self, body):
        sample, start = {}, 0
        for name, (dtype, shape) in self.inputs.items():
            sample[name] = np.frombuffer(body, dtype, int(np.prod(shape)), start).reshape(shape)
            start += sample[name].nbytes
        return sample


class PythonClass(Engine):
    """The only class of a file, with ``predict`` and its tensors as ``ingot serve`` reads them: one in, one out."""

    def __init__(self, path):
        [kind] = (found for found in runpy.run_path(path).values() if hasattr(found, "predict"))
        self.model = kind()
        self.inputs = dict(map(_declared, kind.inputs))
        [self.output] = dict(map(_declared, kind.outputs))

    def run(self, arrays):
        return self.model.predict(arrays)[self.output]


def _declared(text):
    """Return the name, datatype and shape without the batch of a tensor: ``x:float32[batch,64]``."""
    name, dtype, shape = text.rstrip("]").replace("[", ":").split(":")
    return name, (np.dtype(dtype), tuple(map(int, shape.split(",")[1:])))


def engine():
    """Return the runner of the file ``BENCHMARK_MODEL``: an ONNX model, a PyTorch program, or a class in Python."""
    path = os.environ["BENCHMARK_MODEL"]
    if path.endswith(".py"):
        return PythonClass(path)
    if not path.endswith(".pt2"):
        return Engine(path)
    from program import Program

    return Program(path)


_DTYPES = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
