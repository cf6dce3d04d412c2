"""The engine of decoders: the cache of all rows, one step of them, and the choice of each token."""
