"""Rewriting of captured graphs: passes, custom operators, and the rules that use both.

Start reading at passes/manager.py. A new rule is one file in rules/fx or rules/onnx with its test.
"""
