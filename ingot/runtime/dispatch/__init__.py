"""The traffic of one loaded model: requests in, batches to its engines, responses out.

Start in dispatcher.py; pending.py ends requests at their deadlines, batch_run.py runs a batch, worker.py
owns an engine's thread.
"""
