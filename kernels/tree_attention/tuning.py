"""How the Pallas kernel cuts its work."""

from __future__ import annotations

from .pallas import Blocks


def blocks_for(q_shape, k_shape, kv_pages, table_shape) -> Blocks:
    return Blocks(512, 8, 64)
