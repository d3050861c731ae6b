"""Settings of every test."""

import os

# Tiny models gain nothing from threads, and two pools of spinning threads on two cores lose much.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
