"""The kernels of the step: tree attention over a paged cache, sampling, and moving accepted tokens."""

from .compaction import move_cached_tokens
from .mla_attention import latent_pages_shape, mla_tree_attention
from .sampling import tree_sample
from .tree_attention import kv_pages_shape, tree_paged_attention

__all__ = [
    "kv_pages_shape",
    "latent_pages_shape",
    "mla_tree_attention",
    "move_cached_tokens",
    "tree_paged_attention",
    "tree_sample",
]
