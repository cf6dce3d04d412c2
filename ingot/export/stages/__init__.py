"""The stages of an export, in order: capture, rewrite, lower, prove, pack.

:mod:`ingot.export.pipeline` runs them; :class:`~ingot.export.stages.context.Context` is what they share. Start reading
at :mod:`ingot.export.stages.capture`.
"""
