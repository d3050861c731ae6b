"""Models in GGUF files, which hold everything that a folder holds: header, config, tensors,
tokenizer."""
