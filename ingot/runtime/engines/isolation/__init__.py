"""Engines in separate processes: a crash, hang or leak of a model ends such a process, and not the server.

Start in engine.py, which runs in the server; child.py is the program of an engine process.
"""
