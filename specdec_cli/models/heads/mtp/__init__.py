"""Modules for multi-token prediction (DeepSeek-V3, arXiv 2412.19437). Each module consists of a
projection and one layer of the target's model family."""
