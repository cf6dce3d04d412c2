"""Searches that a failed export calls for: the first departing node, and all that stands in a capture's way."""
