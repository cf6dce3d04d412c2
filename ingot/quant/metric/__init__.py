"""Metrics of a model's outputs before and after quantization, with confidence intervals.

Start in base.py for the interface and parse.py for the choice of a metric.
"""

from ingot.quant.metric.base import Comparison, Metric, Outputs, Score, within
from ingot.quant.metric.parse import parse_metric

__all__ = ["Comparison", "Metric", "Outputs", "Score", "parse_metric", "within"]
