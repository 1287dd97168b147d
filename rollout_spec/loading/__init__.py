"""Models from files: Hugging Face folders and GGUF files."""

from rollout_spec.loading.load import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
