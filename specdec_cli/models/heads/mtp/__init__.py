"""Modules for multi-token prediction (DeepSeek-V3, arXiv 2412.19437): each is a projection and one
layer of the target's family."""
