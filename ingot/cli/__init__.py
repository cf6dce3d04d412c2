"""The ``ingot`` command: one module per group of commands; each parses, calls the library and prints.

Start in main.py; output.py prints results and progress for all commands.
"""
