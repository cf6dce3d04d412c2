"""One module a way of computing layers: each changes a graph in place."""
