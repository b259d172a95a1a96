"""Peers train the same model as ours, so that their speed can be compared with ours."""

import math
from dataclasses import replace

import pytest

from scripts import benchmark_training, peers
from scripts.sizes import read_model


@pytest.mark.parametrize("name", ["tiny", "llama"])
def test_a_peer_trains_the_same_model_on_the_same_tokens(name, monkeypatch):
    small = replace(read_model(name, 32), n_layer=2)
    monkeypatch.setattr(benchmark_training, "read_model", lambda *given: small)
    arguments = benchmark_training.Arguments(
        models=[name], seq_lens=[32], implementations=["sdpa"], peers=["transformers"], tokens_per_step=64,
        tokens_per_microbatch=64, steps=2, warmup_steps=0, device="cpu", compile=False, fused_loss=False,
        precision="fp32", low_precision_residual=False, cuda_graphs=False,
    )  # fmt: skip
    ours, theirs = (
        benchmark_training.measure(arguments, *given)
        for _, *given in benchmark_training.steps_to_measure(arguments)
    )
    assert (theirs["implementation"], theirs["fused_gelu"]) == ("transformers", False)
    # theirs counts the padding of the vocabulary
    padding = math.log(small.padded_vocab_size / small.vocab_size)
    assert theirs["final_loss"] == pytest.approx(ours["final_loss"] + padding, abs=2e-5)


def test_peers_that_are_not_installed_are_left_out_with_a_message(monkeypatch, capsys):
    monkeypatch.setattr(peers, "find_spec", lambda package: package == "transformers")
    names = ["liger", "transformers"]
    peers.leave_out_missing_peers(names)
    assert names == ["transformers"]
    assert capsys.readouterr().out == "liger is left out: liger_kernel is not installed\n"
    monkeypatch.setattr(peers, "find_spec", lambda package: True)
    names = ["liger", "transformers"]
    peers.leave_out_missing_peers(names)
    # what liger changes stays changed
    assert names == ["transformers", "liger"]
