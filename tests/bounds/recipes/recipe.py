"""Registers recipes: functions that make a random call of an operator."""

from __future__ import annotations

from collections.abc import Callable

from tests.bounds.generated import Call, Maker

Recipe = Callable[[Maker, str], Call]
RECIPES: dict[tuple[str, str], Recipe] = {}
MS, ML = "com.microsoft", "ai.onnx.ml"
SCALES = (0.5, 0.7, 0.6, 0.3, 1.0, 1.3, 1.7, 2.0, 2.5, 0.1, 0.9)


def recipe(names: str, domain: str = "") -> Callable[[Recipe], Recipe]:
    """Register a function for the operators of these names, which are separated by spaces."""

    def registered(made: Recipe) -> Recipe:
        RECIPES.update({(domain, name): made for name in names.split()})
        return made

    return registered
