"""The transformer: GPT, its attention layer, and generation."""

from model.attention import AttentionConfig
from model.config import ModelConfig
from model.generate import generate
from model.gpt import GPT

__all__ = ["GPT", "AttentionConfig", "ModelConfig", "generate"]
