"""The ``ingot`` command: one module a group of commands; each parses, calls the library and prints."""
