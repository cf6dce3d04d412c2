"""GPUs: streams, events and memory of a device, and the pipeline that keeps it busy. Start in pipeline.py.

``opening.py`` opens a device: ``device.py`` declares what a pipeline needs of a GPU, and ``driver.py`` has it for
NVIDIA's. ``turns.py`` divides the time of a GPU between pipelines, ``graphs.py`` chooses the batches that engines
capture as CUDA graphs, ``pinned.py`` keeps memory of the host, and ``array.py`` describes tensors that are on a GPU
already.
"""
