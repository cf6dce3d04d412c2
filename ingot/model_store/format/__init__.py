"""The archive format: its documents, its variants, and the tar file that holds them.

Nothing here knows where an archive is kept. Start in archive.py; docs/reference/archive-format.md is the specification.
"""
