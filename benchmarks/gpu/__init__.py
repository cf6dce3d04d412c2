"""What pinned memory and bound inputs and outputs gain on a GPU."""
