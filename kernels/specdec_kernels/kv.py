"""Writing keys and values into the paged KV cache: torch reference.

Legend: T packed tokens, NB blocks of BS slots, Hkv heads.
"""

from torch import Tensor


def write_kv_reference(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """See `ops.write_kv`."""
    key_cache.view(-1, *key_cache.shape[2:]).index_copy_(0, slots, key)
    value_cache.view(-1, *value_cache.shape[2:]).index_copy_(0, slots, value)
