"""The kinds of steps after the graph: from its outputs to answers."""
