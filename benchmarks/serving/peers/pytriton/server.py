"""Triton by pytriton: its C++ front, and the model in its Python backend, which is what a Python user gets."""

import numpy as np
from arguments import Engine, parse
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

if __name__ == "__main__":
    options = parse()
    engine = Engine(options.model)

    def infer(requests):
        rows = engine.run({name: np.concatenate([r.data[name] for r in requests]) for name in engine.inputs})
        ends = np.cumsum([len(next(iter(r.data.values()))) for r in requests])
        return [{engine.output: part} for part in np.split(rows, ends[:-1])]

    inputs = [Tensor(name=name, dtype=dtype, shape=shape) for name, (dtype, shape) in engine.inputs.items()]
    width = engine.session.get_outputs()[0].shape[1]
    batcher = DynamicBatcher(max_queue_delay_microseconds=round(1000 * options.delay))
    config = TritonConfig(
        http_address="127.0.0.1",
        http_port=options.port,
        grpc_address="127.0.0.1",
        grpc_port=options.grpc_port,
        allow_metrics=False,
        log_verbose=0,
    )
    with Triton(config=config, workspace=f"{options.work}/triton") as triton:
        triton.bind(
            model_name=options.name,
            infer_func=infer,
            inputs=inputs,
            outputs=[Tensor(name=engine.output, dtype=np.float32, shape=(width,))],
            config=ModelConfig(max_batch_size=options.batch, batcher=batcher),
        )
        triton.serve()
