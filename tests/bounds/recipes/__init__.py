"""A random call of each operator that has a rule; see generated.py. Most of its calls must fit the operator."""

from tests.bounds.recipes import elementwise, graphs, learned, linear, made, normalizing, shaping
from tests.bounds.recipes.recipe import RECIPES

__all__ = ["RECIPES", "elementwise", "graphs", "learned", "linear", "made", "normalizing", "shaping"]
