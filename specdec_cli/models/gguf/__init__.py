"""Read models in GGUF files. One such file holds what a model folder holds: config, tensors and
tokenizer."""
