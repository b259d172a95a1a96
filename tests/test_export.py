import pytest
import torch

from model import GPT, AttentionConfig, ModelConfig
from train.export import export


@pytest.mark.parametrize("patterns", [["dense"], ["window(8)", "dense"]])
def test_patterns_that_an_export_loses_are_told(patterns, tmp_path, capsys):
    config = ModelConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=100, max_seq_len=16, dropout=0.0)
    model = GPT(config, AttentionConfig(implementation="reference", patterns=patterns))
    export(model, "gpt2", tmp_path / "out", torch.float32)
    told = capsys.readouterr().err
    assert ("WARNING: attention.patterns=['window(8)', 'dense'] are no part" in told) == (len(patterns) > 1)
