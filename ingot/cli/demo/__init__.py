"""``ingot demo``: models that are made and served at once."""
