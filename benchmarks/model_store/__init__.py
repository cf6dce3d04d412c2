"""The store, measured: loading and sharing models (load.py), copying archives (transfer.py), moving tags (swaps.py)."""
