"""The models of a running server: loaded, replaced, tried, and within a memory budget."""
