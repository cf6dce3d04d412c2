"""The digits demo: a small model on real data, from training to responses over HTTP and gRPC.

Start in digits.py, which has the model and its data; cli/demo.py runs the steps of ``ingot demo``.
"""
