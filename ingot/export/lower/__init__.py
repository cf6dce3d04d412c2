"""Ways from a Program to something that an engine runs; one module a target."""
