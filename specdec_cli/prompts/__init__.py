"""Reads prompts from options, files, pipes and datasets.

Here a prompt is text, the messages of a conversation, or token ids. Tokenizers and chat templates
are applied elsewhere.
"""

from specdec_cli.prompts.conversations import (
    as_conversations,
    unused_keys,
    unused_template,
)
from specdec_cli.prompts.dataset import parse_dataset
from specdec_cli.prompts.lines import MAX_LINE_BYTES
from specdec_cli.prompts.load import load_prompts, read_prompts
from specdec_cli.prompts.records import DATE_KEY, jsonl_of
from specdec_cli.prompts.turns import next_turn
from specdec_cli.prompts.types import Prompt
