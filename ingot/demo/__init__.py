"""The digits demo: a small model on real data, all the way."""
