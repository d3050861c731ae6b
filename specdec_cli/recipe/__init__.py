"""Recipes: the settings of a run, as a checked and frozen value.

Knows nothing of models, devices or the command line: names of models are text here.
"""

from specdec_cli.recipe.resolve import PROMPTS, bundled_recipes, dump_recipe, load_recipe
from specdec_cli.recipe.schema import Recipe
from specdec_cli.recipe.sections import (
    CacheSection,
    DataSection,
    DraftSection,
    LengthSection,
    ModelSection,
    SamplingSection,
    SpeculationSection,
)
