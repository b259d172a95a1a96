"""The same models by others, to compare with: transformers', alone or with the kernels of liger-kernel."""

from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from model import GPT, ModelConfig
from model.families import FAMILIES, family_of
from model.pretrained import named_parts
from train.overrides import one_of

# in the order in which they must be measured: liger-kernel also changes what transformers builds later
PEERS = ("transformers", "liger")


class Transformers(nn.Module):
    """A model of transformers, called as our GPT: tokens, targets (B, T) int64 -> mean cross-entropy, ().

    attention: one of its attention implementations. Raises ValueError for a model that no family of it holds.
    """

    def __init__(self, config: ModelConfig, attention: str):
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        settings = AutoConfig.for_model(**FAMILIES[family_of(config)].write_config(config), use_cache=False)
        self.model = AutoModelForCausalLM.from_config(settings, attn_implementation=attention)
        # the same loss as without, but without a warning, which would cut what torch.compile makes in two
        self.model.loss_type = "ForCausalLM"

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        # labels alone would be shifted once more
        return self.model(tokens, labels=targets, shift_labels=targets.contiguous()).loss


def build_peer(name: str, ours: GPT) -> Transformers:
    """`ours` as this one of PEERS has it, with the same weights, on the CPU.

    Its vocabulary is padded as ours, which is faster, but its loss counts the padding: at zero logits it is
    larger by the logarithm of padded over real size. Attention is PyTorch's causal one.
    """
    config = replace(ours.config, vocab_size=ours.config.padded_vocab_size)
    peer = Transformers(config, without_mask())
    family = FAMILIES[family_of(config)]
    parts = dict(named_parts(ours.state_dict(), family, config))
    # a tied head is not among them
    peer.model.load_state_dict(parts, strict=not config.tied_head)
    if name == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=peer.model)
    return peer


def without_mask() -> str:
    """The name of PyTorch's causal attention in transformers.

    Under "sdpa" transformers compiled makes a mask of all queries and keys, with which attention is slow.
    """
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    # transformers makes masks only for the implementations that it knows
    name = "sdpa_without_mask"
    AttentionInterface.register(name, sdpa_attention_forward)
    return name


def compile_peer(name: str, peer: Transformers) -> nn.Module:
    """torch.compile of the model; with liger-kernel without head and loss, which cannot be traced."""
    if name != "liger":
        return torch.compile(peer)
    peer.model.base_model.compile()
    return peer


def check_peers(names: list[str], models: list[ModelConfig]) -> None:
    """Raises ValueError for a name that is none of PEERS, and for a model that one of them does not have."""
    for name in names:
        one_of("peers", name, PEERS)
    families = [family_of(model) for model in models if names]
    if "liger" in names and "GPT2LMHeadModel" in families:
        raise ValueError("peers: liger-kernel has nothing for GPT-2: leave it out, or use models=[llama]")


def leave_out_missing_peers(names: list[str]) -> None:
    """Removes those of PEERS that are not installed, with a message, and puts the others in their order."""
    packages = {"transformers": "transformers", "liger": "liger_kernel"}
    for name in names:
        if not find_spec(packages[name]):
            print(f"{name} is left out: {packages[name]} is not installed")
    names[:] = [name for name in PEERS if name in names and find_spec(packages[name])]
