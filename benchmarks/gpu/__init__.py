"""The gain of a pipeline on a GPU."""
