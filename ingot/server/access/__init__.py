"""Access to a server: API keys and the rules that they follow.

Start reading at ``gate.py``; ``auth_file.py`` reads the file of ``--auth``, and ``keys.py`` makes the API keys in it.
"""
