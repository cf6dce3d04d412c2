"""New variants of an archive: the result of a search, and the recipes that need no search.

Start in packing.py, which writes a variant with its evidence; acceptance.py decides whether a result is kept.
"""
