"""ONNX Runtime, and TensorRT in it. Start in ort_engine.py."""
