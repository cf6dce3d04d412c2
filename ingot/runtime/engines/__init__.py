"""Engines: each runs one model file as :class:`ingot.runtime.engines.engine.Engine` says. Start in opening.py.

``loader.py`` also decides in which process an engine runs; ``isolation/`` has engine processes.
"""
