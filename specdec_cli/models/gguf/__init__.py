"""Models in GGUF files: header, files of a model, config, tensors, tokenizer.

A file holds all that a model folder does. Its numbers are undone to plain ones on loading.
"""
