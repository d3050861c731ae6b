"""Recipes: the validated, immutable settings of a run.

This package knows nothing about models, devices or the command line. A model is only a name here.
"""

from specdec_cli.recipe.resolve import (
    PROMPTS,
    bundled_recipes,
    dump_recipe,
    is_bundled,
    load_recipe,
)
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
