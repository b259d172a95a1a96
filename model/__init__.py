"""The transformer: GPT, its attention layer, and generation."""

from model.attention import AttentionConfig
from model.generate import generate
from model.gpt import GPT, ModelConfig

__all__ = ["GPT", "AttentionConfig", "ModelConfig", "generate"]
