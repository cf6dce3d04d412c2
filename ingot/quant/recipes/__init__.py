"""One module a recipe: a transform of an ONNX file into another."""
