"""The traffic of one loaded model: requests in, batches to its engines, responses out.

Start in dispatcher.py; batching.py joins and splits tensors, worker.py owns an engine's thread.
"""
