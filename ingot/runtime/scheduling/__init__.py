"""The scheduling policy: which requests run together, which wait and which are refused.

It has no clock, no thread and no engine: time is an argument. Start in scheduler.py; entry.py
is a request in its queue.
"""
