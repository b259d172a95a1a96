import json
import math
from statistics import mean

import numpy as np
import pytest
import tokenizers
import torch
import torch.nn.functional as F

from data.tokenizer import load_tokenizer
from model import GPT, AttentionConfig, ModelConfig
from scripts import evaluate_context
from scripts.context import (
    LEAST_LENGTH,
    Recall,
    effective_context,
    key_value,
    loss_by_context,
    loss_by_position,
    passkey,
    position_bins,
    recall_accuracy,
    token_losses,
)
from scripts.plot_context import draw_context


@pytest.fixture
def gpt() -> GPT:
    config = ModelConfig(n_layer=2, n_head=2, n_embd=16, vocab_size=257, max_seq_len=64, dropout=0.0)
    return GPT(config, AttentionConfig(implementation="sdpa")).eval()


def test_token_losses_are_the_parts_of_the_mean_loss(gpt, monkeypatch):
    monkeypatch.setattr("scripts.context.HEAD_CHUNK", 7)
    tokens = torch.randint(257, (2, 41))
    losses = token_losses(gpt, tokens[:, :-1], tokens[:, 1:])
    assert losses.shape == (2, 40)
    torch.testing.assert_close(losses.mean(), gpt(tokens[:, :-1], tokens[:, 1:]))
    gpt.bfloat16()
    assert token_losses(gpt, tokens[:, :-1], tokens[:, 1:]).dtype == torch.float32


@pytest.mark.parametrize("seq_len", [1, 2, 3, 64, 65])
def test_bins_of_positions_cover_each_position_once(seq_len):
    covered = [i for first, end in position_bins(seq_len) for i in range(first, end)]
    assert covered == list(range(seq_len))


def test_loss_by_position_is_the_mean_of_each_bin():
    losses = torch.arange(8.0).repeat(3, 1)
    assert [row["loss"] for row in loss_by_position(losses)] == [0.0, 1.0, 2.5, 5.5]


def test_loss_by_context_scores_the_same_tokens_with_more_and_more_before_them(gpt):
    tokens = torch.randint(257, (2, 65))
    rows = loss_by_context(gpt, tokens[:, :-1], tokens[:, 1:], n_scored=8)
    assert [row["context"] for row in rows] == [0, 8, 16, 32, 56]
    for row in rows:
        logits = gpt(tokens[:, 56 - row["context"] : 64])[:, -8:]
        last = F.cross_entropy(logits.transpose(1, 2), tokens[:, 57:])
        assert row["loss"] == pytest.approx(last.item(), rel=1e-5)


def test_effective_context_is_the_least_that_is_as_good_as_all():
    rows = [{"context": c, "loss": loss} for c, loss in ((0, 3.0), (8, 2.0), (16, 1.005), (32, 1.0))]
    assert effective_context(rows) == 16


def test_effective_context_counts_what_is_gained_before_the_loss_grows_again():
    rows = [{"context": c, "loss": loss} for c, loss in ((0, 5.0), (256, 2.0), (4096, 9.0))]
    assert effective_context(rows) == 256


@pytest.mark.parametrize(
    ("losses", "context"),
    [
        ((5.0, 2.0, math.nan), 256),
        ((math.inf, 2.0, 1.0), 4096),
        ((math.nan, math.inf, math.nan), None),
    ],
)
def test_a_loss_that_is_not_finite_is_no_gain_of_context(losses, context):
    rows = [{"context": c, "loss": loss} for c, loss in zip((0, 256, 4096), losses, strict=True)]
    assert effective_context(rows) == context


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_a_passkey_prompt_has_its_length_and_asks_for_what_it_hides(name, depth):
    tokenizer = load_tokenizer(name)
    filler = np.tile(tokenizer.encode("some filler text, "), 200)
    prompt = passkey(tokenizer, filler, 600, depth, np.random.default_rng(0))
    assert len(prompt.tokens) == 600
    text, answer = tokenizer.decode(prompt.tokens), tokenizer.decode(prompt.tokens[-prompt.n_answer :])
    assert text.count(f"# the passkey is{answer}\n") == 1
    assert text.endswith(f"# the passkey is{answer}")
    before, after = text.removesuffix(f"\n# the passkey is{answer}").split(f"\n# the passkey is{answer}\n")
    # in tokens, of which a word of filler has five characters or fewer
    assert len(before) == pytest.approx(depth * len(before + after), abs=5)


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_a_key_value_prompt_asks_for_one_of_its_lines(depth):
    tokenizer = load_tokenizer("gpt2")
    prompt = key_value(tokenizer, 400, depth, np.random.default_rng(0))
    assert 370 < len(prompt.tokens) <= 400
    *lines, question = tokenizer.decode(prompt.tokens).split("\n")
    assert lines.count(question) == 1
    assert lines.index(question) == min(int(depth * len(lines)), len(lines) - 1)


@pytest.mark.parametrize("kind", ["passkey", "key_value"])
def test_an_answer_has_the_tokens_of_what_is_hidden_where_a_tokenizer_begins_texts_with_a_space(
    kind, tmp_path
):
    # Llama 2's does so
    tokens = ["<unk>", "</s>", "\u2581", "\u2581\u2581", "\n", *map(chr, range(33, 127))]
    vocabulary = tokenizers.Tokenizer(
        tokenizers.models.BPE({token: i for i, token in enumerate(tokens)}, [("\u2581", "\u2581")])
    )
    vocabulary.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")]
    )
    vocabulary.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer, rng = load_tokenizer(str(tmp_path)), np.random.default_rng(0)
    draws = {
        "passkey": lambda: passkey(tokenizer, tokenizer.encode("filler" * 50), 200, 0.5, rng),
        "key_value": lambda: key_value(tokenizer, 200, 0.5, rng),
    }
    prompt = draws[kind]()
    text, answer = prompt.tokens.tolist(), prompt.tokens[-prompt.n_answer :].tolist()
    n = len(answer)
    assert n == {"passkey": 1 + 7, "key_value": 1 + 6}[kind]
    assert sum(text[i : i + n] == answer for i in range(len(text))) == 2


@pytest.mark.parametrize(("seed", "depth"), [(72, 0.5), (1269, 0.0), (2316, 0.5)])
def test_a_key_value_prompt_is_no_longer_than_asked_however_long_the_number_asked_for_is(seed, depth):
    tokenizer = load_tokenizer("gpt2")
    # of one or two tokens more than that of the last line
    prompt = key_value(tokenizer, 64, depth, np.random.default_rng(seed))
    assert len(prompt.tokens) <= 64
    *lines, question = tokenizer.decode(prompt.tokens).split("\n")
    assert lines.count(question) == 1


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_the_least_length_has_room_for_needle_and_question(name):
    tokenizer, rng = load_tokenizer(name), np.random.default_rng(0)
    assert len(passkey(tokenizer, tokenizer.encode("filler" * 50), LEAST_LENGTH, 0.5, rng).tokens) == 64
    assert 0 < len(key_value(tokenizer, LEAST_LENGTH, 0.5, rng).tokens) <= 64


def test_recall_prompts_begin_with_what_the_model_has_seen_before_a_text(gpt, monkeypatch):
    prompts = []
    monkeypatch.setattr(
        evaluate_context, "recall_accuracy", lambda _, drawn, __: prompts.extend(drawn) or (0, 0)
    )
    tokenizer = load_tokenizer("bytes")
    arguments = evaluate_context.Arguments(model="m", data="d", prompts=2, depths=[0.0, 1.0])
    filler = tokenizer.encode("filler" * 50)
    evaluate_context.recall_rows(gpt, filler, [LEAST_LENGTH], tokenizer, [256, 7], arguments)
    assert len(prompts) == 8
    assert all(list(prompt.tokens[:2]) == [256, 7] for prompt in prompts)
    assert max(len(prompt.tokens) for prompt in prompts) == LEAST_LENGTH


def test_recall_is_right_only_if_every_token_of_the_answer_is():
    class Copying(GPT):
        """The likeliest token is the one of two places before."""

        def hidden_states(self, tokens, *_):
            return F.one_hot(tokens.roll(1, 1), 257).float() * 20

    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 257, "vocab_size": 257, "max_seq_len": 64, "dropout": 0.0}
    gpt = Copying(ModelConfig(**sizes), AttentionConfig(implementation="sdpa"))
    gpt.token_embedding.weight.data = torch.eye(384, 257)
    prompts = [Recall(np.array(tokens), 2) for tokens in ([1, 2, 1, 2], [1, 2, 1, 3])]
    accuracy, loss = recall_accuracy(gpt, prompts, torch.device("cpu"))
    assert accuracy == 0.5
    assert loss == pytest.approx(20 / 4, abs=1e-3)


@pytest.mark.parametrize("loss", [3.0, math.nan, None])
def test_the_picture_is_drawn(tmp_path, loss):
    rows = [{"kind": "position", "first": 0, "end": 1, "loss": loss}]
    rows += [{"kind": "context", "context": c, "loss": loss} for c in (0, 8)]
    rows += [
        {"kind": k, "length": 64, "depth": 0.5, "accuracy": 0.3, "loss": loss}
        for k in ("passkey", "key_value")
    ]
    draw_context(json.loads(json.dumps(rows)), tmp_path / "context.png")
    assert (tmp_path / "context.png").read_bytes()[:4] == b"\x89PNG"


def test_passkeys_lie_in_different_stretches_of_the_filler():
    tokenizer, rng = load_tokenizer("bytes"), np.random.default_rng(0)
    filler = np.arange(200, dtype=np.uint16)
    begins = {int(passkey(tokenizer, filler, 100, 1.0, rng).tokens[0]) for _ in range(100)}
    assert len(begins) > 50
    # as long as the filler and what surrounds it, there is one place
    longest = len(filler) + len(tokenizer.encode("\n# the passkey is 1234567\n\n# the passkey is 1234567"))
    assert passkey(tokenizer, filler, longest, 1.0, rng).tokens[0] == 0


def test_losses_of_windows_are_their_means(gpt):
    class Loader(list):
        batch, seq_len = list.__getitem__, 64

    tokens = torch.randint(257, (3, 1, 65))
    windows = [(row[:, :-1], row[:, 1:]) for row in tokens]
    arguments = evaluate_context.Arguments(model="m", data="d", device="cpu")
    rows, *each = (
        evaluate_context.text_rows(gpt, Loader(chosen), 64, 8, arguments)
        for chosen in (windows, *([window] for window in windows))
    )
    for row, *alone in zip(rows, *each, strict=True):
        if row["kind"] != "effective_context":
            assert row["loss"] == pytest.approx(mean(one["loss"] for one in alone))


def test_recall_is_asked_at_each_length_and_depth_by_the_seed(monkeypatch):
    drawn = []
    monkeypatch.setattr(
        evaluate_context,
        "recall_accuracy",
        lambda model, prompts, device: drawn.append([prompt.tokens.tolist() for prompt in prompts]) or (0, 0),
    )
    tokenizer = load_tokenizer("bytes")
    filler = tokenizer.encode("some filler text, " * 20)
    given = {"model": "m", "data": "d", "prompts": 2, "depths": [0.0, 1.0]}

    def rows(seed: int) -> tuple[list[dict], list]:
        drawn.clear()
        arguments = evaluate_context.Arguments(**given, seed=seed)
        found = evaluate_context.recall_rows(None, filler, [200, LEAST_LENGTH], tokenizer, [256], arguments)
        return found, list(drawn)

    (found, first), (_, again), (_, other) = rows(1), rows(1), rows(2)
    assert first == again != other
    assert [(row["length"], row["depth"], row["kind"]) for row in found] == [
        (length, depth, kind)
        for length in (LEAST_LENGTH, 200)
        for depth in (0.0, 1.0)
        for kind in ("passkey", "key_value")
    ]
    # one prompt is not another
    assert all(one != two for one, two in first)
    # the token that each begins with is one of its length
    assert all(tokens[0] == 256 for prompts in first for tokens in prompts)
    for row, prompts in zip(found, first, strict=True):
        assert max(map(len, prompts)) <= row["length"]
        if row["kind"] == "passkey":
            assert set(map(len, prompts)) == {row["length"]}


@pytest.mark.parametrize("n_windows", [1, 2, 9])
def test_prompts_may_be_as_long_as_four_windows_or_as_all_there_are(n_windows):
    class Loader(list):
        batch, seq_len = list.__getitem__, 8

    loader = Loader((torch.full((1, 8), number), None) for number in range(n_windows))
    longest = 8 * min(n_windows, 4)
    assert evaluate_context.filler_text(loader, longest).tolist() == [x // 8 for x in range(longest)]
    with pytest.raises(ValueError, match=f"^lengths must be at most {longest}, .* got {longest + 1}: lower"):
        evaluate_context.filler_text(loader, longest + 1)


def test_an_evaluation_refuses_a_sequence_without_context():
    with pytest.raises(ValueError, match="^seq_len must be from 2 to the model's 512 positions, got 1$"):
        evaluate_context.checked_lengths(evaluate_context.Arguments(model="a", data="b", seq_len=1), 512)
