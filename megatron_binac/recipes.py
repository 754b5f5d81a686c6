"""Named runs: each recipe is a function that returns a `Config`. No torch.

What each of them computes is in docs/recipes.md.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable

from megatron_binac import method_recipes, pretrained_recipes, quickstart
from megatron_binac.config import Config

RECIPES: dict[str, Callable[[], Config]] = {
    recipe.__name__: recipe
    for recipe in (*quickstart.RECIPES, *method_recipes.RECIPES, *pretrained_recipes.RECIPES)
}


def get(name: str) -> Config:
    """The config of a recipe; ValueError naming the closest where there is none of that name."""
    if name not in RECIPES:
        close = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.0)
        raise ValueError(
            f"unknown recipe {name!r}; the closest is {close[0]!r} (`binac recipes` lists all)"
        )
    return RECIPES[name]()
