"""Drafting from history. Usable alone, without JAX."""

from .config import DraftConfig
from .drafter import Drafter, make_drafter
from .trie import TrieDrafter

__all__ = ["DraftConfig", "Drafter", "TrieDrafter", "make_drafter"]
