"""The gain of pinned memory and of bound inputs and outputs on a GPU."""
