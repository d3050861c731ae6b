"""Models in GGUF files, which hold all that a folder does: header, config, tensors, tokenizer."""
