"""Tree attention over DeepSeek's latent cache, with the up-projections absorbed into queries and output."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..backend import interpret_mode, resolve_backend
from ..tree_attention.limits import check_latent_limits
from ..tree_attention.reference import tree_paged_attention_reference
from ..tree_attention.tuning import choose_blocks

__all__ = ["latent_pages_shape", "mla_tree_attention"]

_LANES = 128


def latent_pages_shape(num_pages: int, page_size: int, latent_dim: int, rope_dim: int) -> tuple[int, ...]:
    """Shape of `latent_pages` for one layer: a row is latent and rotated key, padded to whole registers."""
    return (1, num_pages, 1, page_size, _row_width(latent_dim, rope_dim))


def mla_tree_attention(
    q_latent: jax.Array,
    q_rope: jax.Array,
    latent: jax.Array,
    rope: jax.Array,
    latent_pages: jax.Array,
    kv_lens: jax.Array,
    page_table: jax.Array,
    cu_q_lens: jax.Array,
    ancestors: jax.Array,
    num_seqs: jax.Array,
    *,
    scale: float,
    backend: str = "auto",
) -> tuple[jax.Array, jax.Array]:
    """Writes the step's latents into their pages, then attends; all heads share one row a token.

    The score of a query and a token is q_latent @ latent + q_rope @ rope, times `scale`; the value is the latent.

    Args:
        q_latent: [T, H, L] queries with the keys' up-projection absorbed; L is 512 in DeepSeek's models.
        q_rope: [T, H, R] the rotated part of queries; R is 64 there.
        latent: [T, L] of the step's tokens, normed.
        rope: [T, R] the rotated key that all heads share.
        latent_pages: one layer's cache, of `latent_pages_shape`. Donate it: the result replaces it.
        kv_lens, page_table, cu_q_lens, ancestors, num_seqs: as for `tree_paged_attention`.
        scale: multiplies scores.
        backend: "auto", "pallas" or "reference", as for `tree_paged_attention`.

    Returns:
        (out [T, H, L] in q_latent's dtype, to be put through the values' up-projection, latent_pages).

    Raises:
        ValueError: sizes that don't fit together, or an unknown backend.
        KernelLimitError: the Pallas kernel doesn't support these sizes or types.
    """
    chosen = resolve_backend(backend)
    latent_dim, width = latent.shape[1], _row_width(latent.shape[1], rope.shape[1])
    if latent_pages.shape[-1] != width:
        raise ValueError(
            f"latent_pages must have rows of {width} numbers for {latent_dim} + {rope.shape[1]}; got "
            f"{latent_pages.shape}: make them of latent_pages_shape"
        )
    queries = _padded(jnp.concatenate([q_latent, q_rope], axis=-1), width)
    rows = _padded(jnp.concatenate([latent, rope], axis=-1), width)[:, None, :]
    ones = jnp.ones((1,), jnp.float32)
    step = (kv_lens, page_table, cu_q_lens, ancestors, num_seqs)
    if chosen == "reference":
        out, latent_pages = tree_paged_attention_reference(
            queries, rows, None, latent_pages, *step, k_scale=ones, v_scale=ones, scale=scale
        )
        return out[..., :latent_dim], latent_pages
    check_latent_limits(queries, rows, latent_pages, page_table, latent_dim=latent_dim, scale=scale)
    from ..tree_attention.pallas import tree_paged_attention_pallas  # Pallas takes a while to import

    return tree_paged_attention_pallas(
        queries,
        (rows,),
        latent_pages,
        *step,
        None,
        ones,
        ones,
        value_dim=latent_dim,
        blocks=choose_blocks(
            tokens_per_sequence=-(-q_latent.shape[0] // page_table.shape[0]),
            num_heads=q_latent.shape[1],
            num_kv_heads=1,
            page_bytes=latent_pages.shape[3] * width * latent_pages.dtype.itemsize,
            page_size=latent_pages.shape[3],
            pages_per_sequence=page_table.shape[1],
        ),
        interpret=interpret_mode(),
        scale=scale,
        sliding_window=None,
        soft_cap=None,
    )


def _row_width(latent_dim: int, rope_dim: int) -> int:
    return -(-(latent_dim + rope_dim) // _LANES) * _LANES


def _padded(array: jax.Array, width: int) -> jax.Array:
    """`array` with zeros up to `width` at its end."""
    return jnp.pad(array, (*[(0, 0)] * (array.ndim - 1), (0, width - array.shape[-1])))
