"""model/flops.py: the conventions against counting by brute force."""

import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernels import block_masks
from model import GPT, AttentionConfig, ModelConfig
from model.attention import layer_masks
from model.config import layer_matrices
from model.flops import TILE, computed_pairs, flops_ledger, visible_pairs, window_pairs
from train.lora import LoraConfig, add_adapters

T = 300
LORA = {"lora_rank": 4}
# under documents a block that both let see something may still hold no visible pair where there are gaps
WITHOUT_GAPS = ("window(70)", "strided(2)", "power_of_two_strided()", "causal()")
PATTERNS = ("window(70)", "window(33) | sinks(5)", "strided(2)", "power_of_two_strided()")


def model_config(**changes) -> ModelConfig:
    values = {"n_layer": 2, "n_head": 2, "n_embd": 64, "vocab_size": 250, "max_seq_len": T, "dropout": 0.0}
    return ModelConfig(**{**values, **changes})


def document_ids(*lengths: list[int]) -> torch.Tensor:
    rows = [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]
    return torch.stack(rows).int()


DOCUMENTS = document_ids([100, 1, 99, 100], [300], [7, 293])
# a negative id is padding, here of whole tiles, of a part of one, of all and of none
PADDED = document_ids([256, 44], [100, 1, 199], [300], [7, 293]) - torch.tensor([[1], [1], [1], [0]]).int()


def brute_force(pattern: str | None, documents: torch.Tensor | None) -> torch.Tensor:
    """(B, T, T) bool: which key each query sees."""
    visible = torch.ones(T, T, dtype=torch.bool).tril()[None]
    if pattern:
        visible = visible & block_masks.parse(pattern, T, block_size=64).to_dense()[:, 0]
    if documents is not None:
        visible = visible & (documents[:, :, None] == documents[:, None]) & (documents >= 0)[:, None]
    return visible


@pytest.mark.parametrize("documents", [None, DOCUMENTS, PADDED], ids=["one-document", "documents", "padding"])
@pytest.mark.parametrize("pattern", [None, *PATTERNS])
def test_visible_pairs_are_those_that_brute_force_counts(pattern, documents):
    mask = block_masks.parse(pattern, T, block_size=64) if pattern else None
    expected = brute_force(pattern, documents).float().sum((1, 2)).mean().item()
    assert visible_pairs(T, mask, documents) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("window", [1, 70, T - 1, T, T + 1, None])
def test_window_pairs_are_those_that_brute_force_counts(window):
    query, key = torch.arange(T)[:, None], torch.arange(T)
    visible = (key <= query) & (key > query - (window or T))
    assert window_pairs(T, window) == visible.sum().item()


@pytest.mark.parametrize(
    ("pattern", "documents"),
    [*((pattern, None) for pattern in (None, *PATTERNS)), *((x, PADDED) for x in (None, *WITHOUT_GAPS))],
)
def test_computed_pairs_are_those_of_tiles_that_hold_a_visible_one(pattern, documents):
    mask = block_masks.parse(pattern, T, block_size=64) if pattern else None
    tile = 64 if pattern else TILE
    padded = torch.nn.functional.pad(brute_force(pattern, documents), (0, -T % tile, 0, -T % tile))
    tiles = padded.unflatten(1, (-1, tile)).unflatten(3, (-1, tile)).any(4).any(2)
    assert computed_pairs(T, mask, documents) == tiles.sum().item() / len(tiles) * tile**2


def test_computed_pairs_leave_out_the_tiles_before_a_document():
    documents = document_ids([128, 172], [300])
    # tiles 0 | 1, 12 and then 0, 01, 012
    assert computed_pairs(T, None, documents) == (4 + 6) / 2 * TILE**2


@pytest.mark.parametrize(
    "lora", [{}, LORA, LORA | {"lora_head": True}], ids=["all", "adapters", "adapters-and-head"]
)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_executed_flops_are_those_that_torch_counts(shape, recompute, lora):
    llama = {"n_kv_head": 1, "mlp_width": 96, "norm": "rms", "mlp": "swiglu", "bias": "none"}
    config = model_config(**(llama if shape == "llama" else {}))
    attention = AttentionConfig(implementation="reference")
    gpt = GPT(config, attention, recompute=recompute)
    if lora:
        add_adapters(gpt, LoraConfig(rank=4, alpha=1.0, embeddings_and_norms="lora_head" in lora))
    tokens = torch.randint(250, (2, T))
    with FlopCounterMode(display=False) as counter:
        gpt(tokens, tokens).backward()
    ledger = flops_ledger(config, attention, T, recompute=recompute, **lora)
    assert counter.get_total_flops() / (2 * T) == ledger["executed"]


@pytest.mark.parametrize("in_documents", [False, True])
def test_a_default_device_changes_no_count(in_documents):
    documents = document_ids([60, 90]) if in_documents else None
    mask = block_masks.window(150, 20, block_size=64)
    counts = []
    for default in ("cpu", "meta"):
        with torch.device(default):
            counts.append(
                [f(150, x, documents) for f in (visible_pairs, computed_pairs) for x in (None, mask)]
            )
    assert counts[0] == counts[1]


def test_the_conventions_stand_side_by_side():
    config = model_config(n_layer=12, n_head=12, n_embd=768, vocab_size=50257, max_seq_len=1024)
    ledger = flops_ledger(config, AttentionConfig(implementation="flash"), 1024)
    n = 124_439_808 - 1024 * 768
    assert ledger["palm"] == 6 * n + 12 * 12 * 768 * 1024
    assert ledger["causal"] == 6 * n + 6 * 12 * 768 * 1024
    # a query sees itself too
    assert ledger["mask"] == 6 * n + 6 * 12 * 768 * 1025
    # no pattern and one document: all pairs of the causal mask are kept
    assert ledger["kept"] == ledger["palm"]
    assert ledger["causal"] < ledger["mask"] < ledger["executed"] < ledger["palm"]
    # beside frozen weights: no gradients of theirs, but of 12 layers' adapters
    adapters = 12 * 4 * 768 * ((1 + 3) + (1 + 1) + (1 + 4) + (4 + 1))
    for head, frozen in ((False, n), (True, n - 50257 * 768)):
        lora = flops_ledger(config, AttentionConfig(implementation="flash"), 1024, **LORA, lora_head=head)
        for convention in ("palm", "causal", "mask"):
            assert ledger[convention] - lora[convention] == pytest.approx(2 * frozen - 6 * adapters)


def test_the_ledger_of_a_million_tokens_with_patterns_takes_a_moment():
    attention = AttentionConfig(implementation="flash", patterns=["window(1024) | strided(16)"])
    start = time.perf_counter()
    ledger = flops_ledger(model_config(n_layer=12), attention, 2**20)
    assert time.perf_counter() - start < 20.0  # three seconds on an idle core
    assert 0.05 < ledger["mask"] / ledger["causal"] < 0.1


def test_a_window_costs_less_and_recomputation_executes_more():
    config = model_config(n_layer=4)
    dense = flops_ledger(config, AttentionConfig(implementation="flash"), T)
    attention = AttentionConfig(implementation="flash", patterns=["window(70)", "dense"], block_size=64)
    window = flops_ledger(config, attention, T)
    assert window["palm"] == dense["palm"]
    masks = layer_masks(attention, 4, T, torch.device("cpu"))
    saved = dense["mask"] - window["mask"]
    missing = 2 * (visible_pairs(T, None) - visible_pairs(T, masks[0])) / T
    assert saved == pytest.approx(12 * 64 * missing)
    again = flops_ledger(config, attention, T, recompute="full")
    assert again["mask"] == window["mask"]
    assert window["executed"] < again["executed"] < 4 / 3 * window["executed"]


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one-document", "documents"])
@pytest.mark.parametrize(("implementation", "products"), [("flash", 7), ("sdpa", 7), ("reference", 6)])
def test_attention_executes_what_its_passes_multiply_of_whole_tiles(implementation, products, documents):
    config, attention = model_config(), AttentionConfig(implementation=implementation)
    executed = flops_ledger(config, attention, T, document_ids=documents)["executed"]
    # a mask of documents tells PyTorch's attention nothing of what it may leave out
    tiled = implementation == "flash" or (implementation == "sdpa" and documents is None)
    pairs = computed_pairs(T, None, documents) if tiled else T**2
    width = config.n_head * config.head_dim
    matrices = sum(rows * columns for rows, columns in layer_matrices(config).values())
    products_of_weights = 6 * (config.n_layer * matrices + config.padded_vocab_size * config.n_embd)
    attention = 2 * products * width * config.n_layer * pairs / T
    assert executed == pytest.approx(products_of_weights + attention, rel=1e-12)
