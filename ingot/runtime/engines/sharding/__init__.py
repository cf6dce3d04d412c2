"""A model that is divided over processes, by its tensors or in stages. Start in sharded.py."""
