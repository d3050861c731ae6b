"""The bundled models, prompts and licences. The only code here maps names to files.

Recipes name the demo pair `demo:target`, `demo:draft`, `demo:draft-distilled`, `demo:eagle3` and
`demo:prompts`; `demo:dflash`, `demo:dspark`, `demo:mtp` and `demo:peagle` are further heads of its
target. `demo:smollm2-draft`, `demo:smollm2-eagle3`, `demo:smollm2-mtp` and `demo:smollm2-dspark`
propose for SmolLM2-135M-Instruct.
"""

from pathlib import Path

PREFIX = "demo:"
FOLDER = Path(__file__).parent


def models() -> list[str]:
    """The names of the bundled models."""
    return sorted(path.parent.name for path in FOLDER.glob("*/config.json"))


def demo_path(name: str) -> Path:
    """The path of `demo:NAME`: a model's folder, or a file of prompts."""
    bare = name.removeprefix(PREFIX)
    prompts = FOLDER / f"{bare}.jsonl"
    return prompts if prompts.is_file() else FOLDER / bare
