"""Ways from a PyTorch module to a Program; one module a way."""
