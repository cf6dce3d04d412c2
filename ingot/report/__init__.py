"""Drawing primitives of every report: pages of HTML, charts and graphs in SVG, columns of text, numbers with units.

A package that reports something keeps its records and chooses what to show; it draws with :mod:`ingot.report.pages`,
:mod:`ingot.report.charts`, :mod:`ingot.report.diagrams`, :mod:`ingot.report.text` and :mod:`ingot.report.units`. Start
reading at ``pages.page``.
"""
