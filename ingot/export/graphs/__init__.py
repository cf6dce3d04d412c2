"""Graphs of every stage as pictures: what a rewrite changed, folded by modules, drawn with :mod:`ingot.report`.

fx.py and onnx.py read graphs into the form of the export report, changes.py compares two, folding.py divides a large
one into drawings, page.py writes them. Only fx.py needs torch. Start in page.py.
"""
