"""train/lora.py: adapters are trained in place of the weights, over any processes, and end inside of them."""

from functools import cache, partial
from pathlib import Path

import faults
import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounter

from model import GPT, AttentionConfig, ModelConfig
from model.compiled import CompiledModel
from tests.test_config import composed
from train.config import parse
from train.lora import VERSION, LoraConfig, add_adapters, merge_adapters
from train.weights import load_model

SDPA = AttentionConfig(implementation="sdpa")
SIZES = {"n_layer": 2, "n_head": 2, "n_embd": 32, "vocab_size": 90, "max_seq_len": 64, "dropout": 0.0}
LLAMA = {"n_kv_head": 1, "mlp_width": 48, "norm": "rms", "mlp": "swiglu", "bias": "none", "tied_head": False}
ADAPTERS = ["model.dropout=0.0", "lora.rank=4", "start.weights=runs/first"]


@pytest.fixture
def started(tmp_path, monkeypatch) -> dict[str, torch.Tensor]:
    """The weights of a run that others start from, runs/first."""
    monkeypatch.chdir(tmp_path)
    faults.write_corpus(tmp_path)
    faults.run_training(faults.small_config("first", 10, "model.dropout=0.0"))
    return load_model("runs/first", SDPA).state_dict()


@pytest.mark.parametrize("changes", [{}, LLAMA], ids=["gpt2", "llama"])
def test_adapters_change_nothing_until_they_are_trained_and_nothing_when_they_are_merged(changes):
    torch.manual_seed(1)
    model = GPT(ModelConfig(**SIZES, **changes), SDPA)
    tokens, names = torch.randint(90, (2, 32)), list(model.state_dict())
    before = model(tokens)
    add_adapters(model, LoraConfig(rank=4, alpha=8.0, embeddings_and_norms=False))
    torch.testing.assert_close(model(tokens), before, rtol=0, atol=0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    # qkv, attention's and the MLP's projections, and its expansion
    assert len(trained) == 2 * 4 * 2
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    for name in trained:
        torch.nn.init.normal_(model.get_parameter(name), std=0.1)
    after = model(tokens)
    assert (after - before).abs().max() > 0.1
    layer = model.blocks[0].attention.qkv
    small = [layer.get_submodule(f"lora_{name}.default").weight.detach() for name in "BA"]
    # alpha / rank is 2
    whole = layer.base_layer.weight.detach() + 2 * small[0] @ small[1]
    merge_adapters(model)
    torch.testing.assert_close(model.blocks[0].attention.qkv.weight.detach(), whole)
    assert list(model.state_dict()) == names
    assert all(parameter.requires_grad for parameter in model.parameters())
    torch.testing.assert_close(model(tokens), after)


def test_a_model_with_adapters_is_compiled_without_a_break_once_for_all_layers(monkeypatch):
    counter, counts = CompileCounter(), []
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counter, fullgraph=True))
    monkeypatch.setattr("model.compiled.compiled_once", cache(torch.compile))
    for n_layer in (3, 6):
        torch._dynamo.reset()
        counter.clear()
        model = GPT(ModelConfig(**SIZES | {"n_layer": n_layer}), SDPA)
        add_adapters(model, LoraConfig(rank=4, alpha=8.0, embeddings_and_norms=False))
        compiled = CompiledModel(model)
        for _ in range(3):
            tokens = torch.randint(90, (2, 32))
            compiled(tokens, tokens).backward()
            counts.append(counter.frame_count)
    # behind the first layer the stream has no gradient in front of it, behind the others it has
    assert counts == [4] * 6


def test_a_run_trains_adapters_alone_and_leaves_a_model_like_any_other(started, capsys):
    given = [*ADAPTERS, "lora.embeddings_and_norms=false", "export=true"]
    val_loss = faults.run_training(faults.small_config("tuned", 20, *given))
    printed = capsys.readouterr().out
    assert "of them trained" in printed
    losses = [line["val_loss"] for line in faults.numbers("tuned") if line.get("val_loss") is not None]
    assert val_loss == losses[-1] < losses[0] - 0.005
    saved, _ = faults.final_state("tuned", 20)
    saved = {name: value for (name, _), value in saved.items()}
    for name, value in started.items():
        assert torch.equal(saved[in_checkpoint(name)], value), name
    moments = [name for name in saved if name.startswith("optimizer.")]
    assert moments
    assert all(".lora_" in name for name in moments)

    ours = load_model("runs/tuned", SDPA).eval()
    assert list(ours.state_dict()) == list(started)
    name = "blocks.0.attention.qkv.weight"
    assert not torch.equal(ours.state_dict()[name], started[name])
    theirs = transformers.AutoModelForCausalLM.from_pretrained("runs/tuned/hugging_face")
    tokens = torch.randint(90, (1, 32))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)
    # and others start from it
    faults.run_training(faults.small_config("next", 2, "start.weights=runs/tuned"))
    first = next(line["val_loss"] for line in faults.numbers("next"))
    assert first == pytest.approx(val_loss, abs=1e-3)


def test_adapters_resume_bit_for_bit_and_are_the_same_over_copies_and_shards(started):
    given = [*ADAPTERS, "optim.final_learning_rate_ratio=1.0"]
    models = []
    try:
        for world_size, distributed in ((1, "ddp"), (2, "ddp"), (2, "fsdp")):
            name = f"{distributed}-{world_size}"
            options = [*given, f"distributed={distributed}"]
            faults.complete(faults.small_config(f"{name}-whole", 10, *options), world_size)
            faults.complete(faults.small_config(f"{name}-parts", 5, *options), world_size)
            faults.complete(faults.small_config(f"{name}-parts", 10, *options), world_size)
            whole, parts = (load_model(f"runs/{name}-{which}", SDPA) for which in ("whole", "parts"))
            assert all(map(torch.equal, whole.parameters(), parts.parameters()))
            models.append(whole.state_dict())
    finally:
        faults.Attempt.kill_all()
    for name, value in models[0].items():
        for other in models[1:]:
            torch.testing.assert_close(other[name], value, rtol=0, atol=2e-3, msg=name)


def test_embeddings_and_norms_are_trained_beside_adapters_if_asked_for(started):
    faults.run_training(faults.small_config("tuned", 5, *ADAPTERS))
    saved = {name: value for (name, _), value in faults.final_state("tuned", 5)[0].items()}
    for name, value in started.items():
        assert torch.equal(saved[in_checkpoint(name)], value) == is_frozen(name), name


def is_frozen(name: str) -> bool:
    """Whether it is a matrix of a layer or its bias, which has an adapter beside it."""
    return ".attention." in name or ".mlp." in name


def in_checkpoint(name: str) -> str:
    return "model." + (".base_layer.".join(name.rsplit(".", 1)) if is_frozen(name) else name)


def test_a_run_goes_on_with_the_adapters_that_it_has(started):
    faults.run_training(faults.small_config("tuned", 2, *ADAPTERS))
    with pytest.raises(ValueError, match="lora.rank is 4 in the checkpoint and 8 in the configuration"):
        faults.run_training(faults.small_config("tuned", 4, *ADAPTERS, "lora.rank=8"))
    with pytest.raises(ValueError, match="lora.alpha is 16.0 in the checkpoint and 4.0 in the configuration"):
        faults.run_training(faults.small_config("tuned", 4, *ADAPTERS, "lora.alpha=4"))
    other = "lora.embeddings_and_norms is True in the checkpoint and False in the configuration"
    with pytest.raises(ValueError, match=other):
        faults.run_training(faults.small_config("tuned", 4, *ADAPTERS, "lora.embeddings_and_norms=false"))
    with pytest.raises(ValueError, match="lora.rank must be below the 32 channels of the model, got 32"):
        faults.small_config("tuned", 4, *ADAPTERS, "lora.rank=32")
    with pytest.raises(ValueError, match="lora.rank is 4 in the checkpoint and 0 in the configuration"):
        faults.run_training(faults.small_config("tuned", 4, "start.weights=runs/first"))
    with pytest.raises(ValueError, match="lora.rank is 0 in the checkpoint and 4 in the configuration"):
        faults.run_training(faults.small_config("first", 20, "lora.rank=4", "start.weights=runs/first"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lora.rank=-1"], "lora.rank must be at least 0, got -1"),
        (["lora.rank=4", "lora.alpha=0"], "lora.alpha must be above 0 and finite, got 0.0"),
        (["lora.rank=4", "lora.alpha=inf"], "lora.alpha must be above 0 and finite, got inf"),
        (["lora.rank=4"], "lora.rank=4 trains beside weights that are there: give start.weights"),
        (
            ["lora.rank=4", "start.weights=runs/first", "optim=muon"],
            "lora.rank=4 has no matrix that optim.algorithm=muon is made for: use optim=adamw",
        ),
    ],
)
def test_what_adapters_cannot_do_is_refused(overrides, message):
    with pytest.raises(ValueError, match=message):
        parse(composed("device=cpu", *overrides))


def test_a_machine_without_peft_is_told_how_to_get_it(started, monkeypatch):
    faults.run_training(faults.small_config("tuned", 2, *ADAPTERS))
    monkeypatch.setattr("train.lora.find_spec", lambda name: None)
    config, message = (
        LoraConfig(rank=4, alpha=1.0, embeddings_and_norms=True),
        r"adapters \(lora.rank=4\) need peft: pip install peft==\d",
    )
    with pytest.raises(ValueError, match=message):
        config.check("weights", "adamw")
    with pytest.raises(ValueError, match=message):
        add_adapters(GPT(ModelConfig(**SIZES), SDPA), config)
    # before the text is prepared
    full = faults.small_config("full", 2, "start.weights=runs/tuned", "data.folder=new")
    with pytest.raises(ValueError, match=f"start.weights=runs/tuned: {message}"):
        faults.run_training(full)
    assert not Path("new").exists()
    pinned = Path(__file__).parent.parent / "requirements-dev.txt"
    assert f"\npeft=={VERSION}\n" in pinned.read_text()


@pytest.mark.gpu
def test_a_compiled_run_on_a_gpu_trains_adapters_through_our_kernels(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    faults.write_corpus(tmp_path)
    on_gpu = ["device=cuda", "precision=bf16", "attention=flash", "fused_loss=true", "compile=true"]
    on_gpu += ["model.n_embd=128", "model.dropout=0.0"]
    faults.run_training(faults.small_config("first", 10, *on_gpu))
    val_loss = faults.run_training(faults.small_config("tuned", 20, *on_gpu, *ADAPTERS))
    losses = [line["val_loss"] for line in faults.numbers("tuned") if line.get("val_loss") is not None]
    assert val_loss < losses[0] - 0.1
    # merged it is the same model
    faults.run_training(faults.small_config("next", 1, *on_gpu, "start.weights=runs/tuned"))
    first = next(line["val_loss"] for line in faults.numbers("next"))
    assert first == pytest.approx(val_loss, abs=1e-2)


@pytest.mark.parametrize("rank", [31, 32])
def test_adapters_are_smaller_than_the_matrices_beside_them(rank):
    model = ModelConfig(n_layer=1, n_head=2, n_embd=32, vocab_size=90, max_seq_len=64, dropout=0.0)
    lora = LoraConfig(rank=rank, alpha=1.0, embeddings_and_norms=False)
    if rank < 32:
        lora.check_rank(model)
        return
    with pytest.raises(ValueError, match="lora.rank must be below the 32 channels of the model, got 32"):
        lora.check_rank(model)
