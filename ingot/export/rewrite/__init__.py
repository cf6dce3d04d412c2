"""Rewriting of captured graphs: passes, custom operators, and the rules that use both.

Start in passes/manager.py; a new rule is one file in rules/fx or rules/onnx with its test.
"""
