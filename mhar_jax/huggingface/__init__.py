"""Reading Hugging Face directories: Llama, Qwen3, and the published routed layouts."""

from mhar_jax.huggingface.load import load_huggingface

__all__ = ["load_huggingface"]
