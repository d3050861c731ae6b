"""The bundled models, prompts and licences, and code that finds their files by name.

Recipes refer to them by these names:
- `demo:target`, and `demo:prompts` for a file of prompts.
- Drafts for `demo:target`: `demo:draft`, `demo:draft-distilled`, `demo:eagle3`, `demo:dflash`,
  `demo:dspark`, `demo:mtp` and `demo:peagle`.
- Drafts for SmolLM2-135M-Instruct: `demo:smollm2-draft`, `demo:smollm2-eagle3`,
  `demo:smollm2-mtp` and `demo:smollm2-dspark`.
"""

from pathlib import Path

PREFIX = "demo:"
FOLDER = Path(__file__).parent


def models() -> list[str]:
    """Return the names of the bundled models."""
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def demo_path(name: str) -> Path:
    """Return the path that `demo:NAME` stands for: a model's folder, or a file of prompts."""
    bare = name.removeprefix(PREFIX)
    prompts = FOLDER / f"{bare}.jsonl"
    return prompts if prompts.is_file() else FOLDER / bare
