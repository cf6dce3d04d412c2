"""The traffic of one loaded model: requests in, batches to its engines, responses out.

Start in dispatcher.py; pending.py ends requests at their deadlines, batching.py joins and splits tensors, worker.py
owns an engine's thread.
"""
