"""Content-addressed blobs: descriptors, digest checks, and the folders and servers that hold blobs.

Every byte that is read passes a digest check here. Start in blobs.py; folder.py keeps blobs on disk.
"""
