"""The ``ingot`` command: one module per group of commands; each parses, calls the library and prints."""
