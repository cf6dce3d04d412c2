"""Content-addressed blobs: descriptors, digest checks, and the folders and servers that hold blobs.

Documents are checked when they are read (blobs.py), and all blobs when they are copied (folder.py). Engines open the
files of a folder unchecked; runtime/loading/trust_check.py checks them first if there is a trust policy. Start in
blobs.py, then in folder.py.
"""
