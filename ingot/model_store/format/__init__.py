"""The archive format: its documents, its variants, and the tar file that holds them.

Nothing here knows where an archive is kept. Start in archive.py; manifest.py has the documents,
onnx_graph.py reads and writes graphs, and docs/reference/archive-format.md is the specification.
"""
