"""Schemes of computing layers, one module each; they change a graph in place."""
