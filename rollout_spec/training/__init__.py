"""What a trainer needs to keep multi-token-prediction heads trained along with its policy."""

from rollout_spec.training.mtp import init_mtp_heads, mtp_loss, mtp_losses, trunk_states

__all__ = ["init_mtp_heads", "mtp_loss", "mtp_losses", "trunk_states"]
