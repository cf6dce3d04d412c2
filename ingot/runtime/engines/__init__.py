"""One module per engine; each implements :class:`ingot.runtime.engine.Engine`. Start in ort.py."""
