"""Weights: names and layouts of checkpoints."""

from rollout_spec.weights.names import expected_names, expected_shapes, from_hf, hf_name, is_ignored, to_hf

__all__ = ["expected_names", "expected_shapes", "from_hf", "hf_name", "is_ignored", "to_hf"]
