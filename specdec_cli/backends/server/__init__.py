"""A backend that measures inference servers over HTTP. It does not import torch."""
