import pytest
from test_config import composed

from model import GPT, AttentionConfig, ModelConfig
from train.config import parse
from train.parallel import gather, set_gradient_sync, whole


def small() -> GPT:
    config = ModelConfig(n_layer=1, n_head=2, n_embd=32, vocab_size=100, max_seq_len=8, dropout=0.0)
    return GPT(config, AttentionConfig(implementation="sdpa"), fused_loss=False, low_precision_residual=False)


def test_whole_weights_are_what_they_are():
    weights = small()
    set_gradient_sync(weights, False)
    assert gather(weights, small) is weights
    assert whole(weights.token_embedding.weight) is weights.token_embedding.weight


def test_a_loss_scale_is_refused_for_shards():
    with pytest.raises(ValueError, match="distributed=fsdp has no loss scale .*: use precision=bf16"):
        parse(composed("distributed=fsdp", "precision=fp16"))
    with pytest.raises(ValueError, match="distributed must be one of ddp, fsdp, got 'zero'"):
        parse(composed("distributed=zero"))
    assert parse(composed("distributed=fsdp")).distributed == "fsdp"
