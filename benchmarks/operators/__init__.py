"""PyTorch's own operator and module databases, exported and judged by eager."""
