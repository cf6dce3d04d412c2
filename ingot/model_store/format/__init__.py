"""The archive format: its documents, its variants, and the tar file that holds them.

Nothing here knows where an archive is kept. Start in archive.py; manifest.py has the documents,
goldens.py stores cases to replay, attachments.py what refers to an archive, partition.py the plan of a
partitioned variant; onnx_graph.py reads and writes graphs, and docs/reference/archive-format.md is the specification.
"""
