"""What quantization by Ingot and by its peers costs and wins: see ``python -m benchmarks.quant --help``."""
