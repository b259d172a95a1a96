import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch._dynamo.testing
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from model import GPT, AttentionConfig, ModelConfig, generate
from model.generate import Arrivals, Decoder, compiled_advance, empty_caches, likeliest, sample, stream
from model.rope import RotaryConfig


@pytest.fixture
def gpt() -> GPT:
    config = ModelConfig(n_layer=2, n_head=2, n_embd=32, vocab_size=100, max_seq_len=40, dropout=0.1)
    model = GPT(config, AttentionConfig(implementation="sdpa"))
    # far from uniform, so that the likeliest token is beyond rounding
    torch.nn.init.normal_(model.token_embedding.weight, std=0.15)
    return model


def by_plain_attention(gpt: GPT) -> GPT:
    """The same model, for inference."""
    other = GPT(gpt.config, replace(gpt.attention, implementation="reference"))
    other.load_state_dict(gpt.state_dict())
    return other.to(gpt.token_embedding.weight.device).eval()


def greedy_without_cache(gpt: GPT, tokens: torch.Tensor, n_new: int) -> torch.Tensor:
    """By attention to all tokens, each time anew."""
    gpt = by_plain_attention(gpt)
    for _ in range(n_new):
        tokens = torch.cat((tokens, gpt(tokens)[:, -1:].argmax(-1)), dim=1)
    return tokens


def reshaped(gpt: GPT, implementation: str, patterns: list[str] | None = None, **changes) -> GPT:
    """Another model with the same embedding."""
    attention = AttentionConfig(implementation=implementation, patterns=patterns or ["dense"], block_size=64)
    other = GPT(replace(gpt.config, **changes), attention)
    other.token_embedding.weight = gpt.token_embedding.weight
    return other


LLAMA = {"n_kv_head": 1, "rotary": RotaryConfig(base=100.0), "norm": "rms"}


QWEN = {**LLAMA, "qk_norm": True}


@pytest.mark.parametrize("implementation", ["sdpa", "reference", "flash"])
@pytest.mark.parametrize("changes", [{}, LLAMA], ids=["gpt2", "llama"])
def test_the_cache_gives_the_same_tokens_as_no_cache(gpt, implementation, changes, device):
    gpt = reshaped(gpt, implementation, **changes).to(device)
    prompt = torch.randint(100, (3, 7), device=device)
    cached = generate(gpt, prompt, 12, temperature=0.0)
    assert torch.equal(cached, greedy_without_cache(gpt, prompt, 12))


@pytest.mark.parametrize("implementation", ["sdpa", "reference", "flash"])
@pytest.mark.parametrize("changes", [{}, LLAMA, QWEN], ids=["gpt2", "llama", "qwen"])
@pytest.mark.parametrize("prompt_len", [1, 7])
@torch.no_grad()
def test_a_step_gives_the_logits_of_the_whole_sequence(gpt, implementation, changes, prompt_len, device):
    gpt = reshaped(gpt, implementation, **changes).to(device).eval()
    for name, weight in gpt.named_parameters():
        if name.startswith("blocks"):
            # so large that every part of a layer shows in the logits
            torch.nn.init.normal_(weight, std=0.5)
    tokens = torch.randint(100, (3, prompt_len + 3), device=device)
    decoder = Decoder(gpt, 3, prompt_len + 3)
    logits = [decoder.start(tokens[:, :prompt_len])]
    for place in range(3):
        decoder.drawn[place] = tokens[:, prompt_len + place]
        logits.append(decoder.step().clone())
    expected = gpt(tokens)[:, prompt_len - 1 :]
    torch.testing.assert_close(torch.stack(logits, dim=1), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("implementation", ["reference", "flash"])
@pytest.mark.parametrize("prompt_len", [1, 20])
def test_a_window_keeps_a_cache_of_its_size_and_gives_the_same_tokens(
    gpt, implementation, prompt_len, device
):
    patterns = ["window(9)", "window(4) | strided(2)"]
    gpt = reshaped(gpt, implementation, patterns, n_layer=2).to(device)
    caches = empty_caches(gpt, 40, torch.zeros(3, dtype=torch.int64, device=device))
    assert [cache.k.shape[1] for cache in caches] == [9, 40]
    prompt = torch.randint(100, (3, prompt_len), device=device)
    cached = generate(gpt, prompt, 12, temperature=0.0)
    assert torch.equal(cached, greedy_without_cache(gpt, prompt, 12))


@pytest.mark.parametrize("implementation", ["reference", "flash"])
@pytest.mark.parametrize("patterns", [["dense"], ["window(5)", "dense"]])
@pytest.mark.parametrize("changes", [{}, LLAMA], ids=["gpt2", "llama"])
def test_prompts_of_different_lengths_go_on_as_each_would_alone(gpt, implementation, patterns, changes):
    gpt = reshaped(gpt, implementation, patterns, **changes)
    prompts, lengths = torch.randint(100, (3, 11)), torch.tensor([11, 1, 4])
    together = torch.stack(list(stream(gpt, prompts, 8, lengths=lengths, temperature=0.0)), dim=1)
    for row, length in enumerate(lengths):
        alone = generate(gpt, prompts[row : row + 1, :length], 8, temperature=0.0)
        assert torch.equal(together[row], alone[0, length:])


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor, lambda ids: np.array(ids, np.uint8)])
def test_stop_tokens_may_be_arrays(gpt, kind):
    prompt = torch.randint(100, (1, 5))
    free = generate(gpt, prompt, 20, temperature=0.0)
    for places in ([8], [8, 12]):
        stops = free[0, places].tolist()
        expected = generate(gpt, prompt, 20, temperature=0.0, stop_tokens=stops)
        assert expected.shape[1] < free.shape[1]
        assert torch.equal(generate(gpt, prompt, 20, temperature=0.0, stop_tokens=kind(stops)), expected)
    for wrong in (0, [1.5], [True], [[1]]):
        with pytest.raises(ValueError, match="stop_tokens must be a sequence of integers, got .*: write"):
            generate(gpt, prompt, 20, stop_tokens=wrong)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_a_sequence_repeats_its_stop_token_and_all_stopped_end_the_stream(gpt, compiled, device):
    gpt, prompt = gpt.to(device), torch.randint(100, (2, 5), device=device)
    free = generate(gpt, prompt, 20, temperature=0.0)[:, 5:]
    stops = [int(free[0, 3]), int(free[1, 8])]
    new = generate(gpt, prompt, 20, temperature=0.0, stop_tokens=stops, compiled=compiled)[:, 5:]
    first = [min(row.index(stop) for stop in stops if stop in row) for row in free.tolist()]
    assert new.shape[1] == max(first) + 1
    for row, at in enumerate(first):
        assert torch.equal(new[row, : at + 1], free[row, : at + 1])
        assert set(new[row, at:].tolist()) == {int(free[row, at])}


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}]
)
@pytest.mark.parametrize("stops", [(), range(0, 100, 10)], ids=["free", "stops"])
@torch.no_grad()
def test_tokens_are_chosen_as_from_the_logits_of_whole_sequences(gpt, options, stops, device):
    gpt, prompt = gpt.to(device).eval(), torch.randint(100, (3, 5), device=device)
    generator = torch.Generator(device).manual_seed(1)
    cached = generate(gpt, prompt, 20, stop_tokens=stops, generator=generator, **options)
    generator.manual_seed(1)
    options = {"temperature": 1.0, "top_k": None, "top_p": None, "generator": generator} | options
    stops, tokens = torch.tensor(stops, dtype=torch.int64, device=device), prompt
    # all that was asked for, unless every sequence has stopped before
    assert cached.shape[1] == prompt.shape[1] + 20 or torch.isin(cached[:, -1], stops).all()
    while tokens.shape < cached.shape:
        logits, newest = gpt(tokens)[:, -1], tokens[:, -1]
        new = sample(logits, **options) if options["temperature"] else logits.argmax(-1)
        if tokens.shape != prompt.shape:
            new = torch.where(torch.isin(newest, stops), newest, new)
        tokens = torch.cat((tokens, new[:, None]), dim=1)
    assert torch.equal(cached, tokens)


@torch.no_grad()
def test_a_step_repeats_the_same_operations_on_the_same_memory_as_a_captured_graph_does(gpt):
    gpt, prompt = reshaped(gpt, "reference", **LLAMA).eval(), torch.randint(100, (2, 5))
    decoder = Decoder(gpt, 2, 17, lambda logits, newest: logits.argmax(-1))
    # other prompts before leave nothing behind
    decoder.drawn[0] = decoder.start(prompt.flip(1)).argmax(-1)
    decoder.step()
    decoder.drawn[0] = decoder.start(prompt).argmax(-1)
    replay = make_fx(lambda: decoder.step())()
    for _ in range(10):
        replay()
    assert torch.equal(decoder.drawn[:12].T, greedy_without_cache(gpt, prompt, 12)[:, 5:])


def test_a_token_takes_one_pass_and_none_that_nobody_asks_for(gpt, monkeypatch):
    passes = []
    hidden_states = GPT.hidden_states
    monkeypatch.setattr(
        GPT, "hidden_states", lambda self, tokens, *rest, **named: passes.append(tokens.shape) or
        hidden_states(self, tokens, *rest, **named),
    )  # fmt: skip
    prompt = torch.randint(100, (2, 5))
    assert torch.equal(generate(gpt, prompt, 0), prompt)
    assert passes == []
    tokens = stream(gpt, prompt, 3)
    for expected in ([(2, 5)], [(2, 5), (2, 1)], [(2, 5), (2, 1), (2, 1)]):
        next(tokens)
        assert passes == expected
    assert list(tokens) == []
    assert len(passes) == 3


def test_a_compiled_step_gives_the_same_tokens_and_is_compiled_once(gpt, monkeypatch):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compile_with = torch.compile

    def counted(function, *, dynamic: bool, options: dict | None = None):
        assert set(options or {}) <= set(torch._inductor.list_options())
        return compile_with(function, backend=counter, dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", counted)
    compiled_advance.cache_clear()
    prompt = torch.randint(100, (2, 5))
    expected = generate(gpt, prompt, 10, temperature=0.0)
    assert torch.equal(generate(gpt, prompt, 10, temperature=0.0, compiled=True), expected)
    # the step and the choice of its likeliest token in one
    assert counter.frame_count == 1
    # one more for stop tokens, whichever they are, and none for another prompt of the same sum
    for stop in (3, 46):
        generate(gpt, prompt, 10, temperature=0.0, compiled=True, stop_tokens=[stop])
    generate(gpt, torch.randint(100, (2, 7)), 8, temperature=0.0, compiled=True)
    assert counter.frame_count == 2
    # and one for each length, however many there are
    for n_new in range(11, 21):
        generate(gpt, prompt, n_new, temperature=0.0, compiled=True)
    assert counter.frame_count == 12
    compiled_advance.cache_clear()


@pytest.mark.parametrize("compiled", [False, True])
def test_caches_and_graph_are_free_as_soon_as_a_stream_ends_or_is_left(gpt, compiled, device, monkeypatch):
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **_: compile_with(function, backend="eager"))
    compiled_advance.cache_clear()
    there = []
    start = Decoder.start
    monkeypatch.setattr(
        Decoder, "start", lambda self, *given: there.append(weakref.ref(self)) or start(self, *given)
    )
    gpt, prompt = gpt.to(device), torch.randint(100, (2, 5), device=device)
    gc.disable()
    try:
        generate(gpt, prompt, 8, compiled=compiled)
        left = stream(gpt, prompt, 8, compiled=compiled)
        for _ in range(4):
            next(left)
        assert [decoder() is None for decoder in there] == [True, False]
        del left
        assert there[1]() is None
    finally:
        gc.enable()
        compiled_advance.cache_clear()


def test_the_likeliest_token_is_what_argmax_gives_the_first_of_equals():
    torch.manual_seed(0)
    for vocab_size in (1, 100, 128, 1000):
        logits = torch.randint(5, (7, vocab_size)).to(torch.bfloat16)
        logits[0] = float("-inf")
        assert torch.equal(likeliest(logits), logits.argmax(dim=-1))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("patterns", [["dense"], ["window(200)", "window(100) | strided(4)", "dense"]])
# the likeliest, chosen inside of the graph and behind it
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 1}], ids=["inside", "behind"])
@torch.no_grad()
def test_a_captured_graph_gives_the_same_tokens_as_no_cache(patterns, options, compiled):
    changes = {"n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 256, "dropout": 0.0, "max_seq_len": 1024}
    config = ModelConfig(vocab_size=100, rotary=RotaryConfig(base=1e4), **changes)
    attention = AttentionConfig(implementation="flash", patterns=patterns)
    gpt = GPT(config, attention).cuda()
    torch.nn.init.normal_(gpt.token_embedding.weight, std=0.15)
    prompt = torch.randint(100, (2, 700), device="cuda")
    cached = generate(gpt, prompt, 300, compiled=compiled, **options)
    assert torch.equal(cached[:, :724], greedy_without_cache(gpt, prompt, 24))
    # and all of them at once: no token sees those behind it
    assert torch.equal(cached[:, 700:], by_plain_attention(gpt)(cached)[:, 699:-1].argmax(-1))


@pytest.mark.gpu
def test_a_row_arrives_as_it_was_when_sent_and_waits_for_nothing_launched_later():
    rows = torch.zeros(3, 5, dtype=torch.int64, device="cuda")
    arrivals, later = Arrivals(rows), torch.cuda.Event()
    for index in range(3):
        torch.cuda._sleep(20_000_000)
        rows[index] = index + 1
        arrivals.send(index)
        torch.cuda._sleep(200_000_000)
        later.record()
        assert arrivals.wait(index).tolist() == [index + 1] * 5
        assert not later.query()


def test_the_same_seed_gives_the_same_sample_and_another_seed_another(gpt):
    prompt = torch.zeros(1, 1, dtype=torch.long)
    samples = [generate(gpt, prompt, 30, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(samples[0], samples[1])
    assert not torch.equal(samples[0], samples[2])


@pytest.mark.parametrize(
    ("implementation", "patterns"),
    [
        ("sdpa", ["dense"]),
        *(
            (name, patterns)
            for name in ("reference", "flash")
            for patterns in (["dense"], ["window(5)", "dense"], ["window(4) | sinks(1)"])
        ),
    ],
)
@pytest.mark.parametrize("changes", [{}, LLAMA], ids=["gpt2", "llama"])
@torch.no_grad()
def test_a_step_gives_prompts_of_different_lengths_the_logits_of_each_alone(
    gpt, implementation, patterns, changes
):
    gpt = reshaped(gpt, implementation, patterns, **changes).eval()
    for name, weight in gpt.named_parameters():
        if name.startswith("blocks"):
            # so large that every key that is seen shows in the logits
            torch.nn.init.normal_(weight, std=0.5)
    prompts, lengths, new = torch.randint(100, (3, 11)), torch.tensor([11, 1, 4]), torch.randint(100, (3, 3))
    decoder = Decoder(gpt, 3, 14)
    logits = [decoder.start(prompts, lengths)]
    for place in range(3):
        decoder.drawn[place] = new[:, place]
        logits.append(decoder.step().clone())
    for row, length in enumerate(lengths):
        alone = torch.cat((prompts[row, :length], new[row]))[None]
        actual = torch.stack([of_step[row] for of_step in logits])
        torch.testing.assert_close(actual, gpt(alone)[0, length - 1 :], rtol=1e-3, atol=1e-4)


def test_logits_are_divided_by_the_temperature():
    logits, generator = torch.tensor([[2.0, 1.0, 0.0]]), torch.Generator().manual_seed(1)
    for temperature in (0.5, 2.0):
        options = {"temperature": temperature, "top_k": None, "top_p": None, "generator": generator}
        drawn = sample(logits.expand(20_000, 3), **options).bincount(minlength=3) / 20_000
        torch.testing.assert_close(drawn, (logits[0] / temperature).softmax(0), rtol=0, atol=0.02)


def test_top_k_draws_from_the_k_likeliest_only(gpt):
    prompt = torch.zeros(200, 1, dtype=torch.long)
    gpt.eval()
    allowed = gpt(prompt[:1])[0, -1].topk(3).indices
    drawn = generate(gpt, prompt, 1, top_k=3, temperature=5.0)[:, -1].unique()
    assert set(drawn.tolist()) == set(allowed.tolist())


def test_top_p_keeps_the_smallest_set_that_holds_p(gpt):
    prompt = torch.zeros(300, 1, dtype=torch.long)
    gpt.eval()
    probabilities, ids = gpt(prompt[:1])[0, -1].softmax(-1).sort(descending=True)
    n = int((probabilities.cumsum(0) < 0.5).sum()) + 1
    drawn = generate(gpt, prompt, 1, top_p=0.5)[:, -1].unique()
    assert set(drawn.tolist()) <= set(ids[:n].tolist())
    assert len(drawn) > 1 or n == 1


@pytest.mark.parametrize(("top_p", "n"), [(0.5, 1), (0.51, 2)])
def test_tokens_that_hold_p_exactly_are_all_that_is_kept(top_p, n):
    drawn = sample(torch.zeros(100, 2), 1.0, None, top_p, torch.Generator().manual_seed(0))
    assert len(drawn.unique()) == n


class RefusingFloatSums(TorchDispatchMode):
    """As torch.use_deterministic_algorithms refuses them on a GPU."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.aten.cumsum.default and args[0].is_floating_point():
            raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")
        return operator(*args, **(kwargs or {}))


@pytest.mark.parametrize("top_k", [None, 20])
def test_top_p_draws_where_torchs_deterministic_switch_refuses_running_sums_of_floats(gpt, top_k):
    prompt = torch.randint(100, (4, 5))
    with RefusingFloatSums():
        generate(gpt, prompt, 3, top_k=top_k, top_p=0.9)


@pytest.mark.gpu
def test_top_p_draws_under_torchs_deterministic_switch(gpt, device):
    torch.use_deterministic_algorithms(True)
    try:
        generate(gpt.to(device), torch.randint(100, (4, 5), device=device), 3, top_p=0.9)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"top_k": 50}, {"top_p": 0.9}, {}])
def test_only_ids_below_vocab_size_are_drawn(gpt, options):
    prompt = torch.randint(100, (50, 5))
    assert generate(gpt, prompt, 10, **options)[:, 5:].max() >= 20
    assert generate(gpt, prompt, 10, vocab_size=20, **options)[:, 5:].max() < 20


def test_a_tiny_top_p_is_greedy(gpt):
    prompt = torch.randint(100, (4, 5))
    greedy = generate(gpt, prompt, 10, temperature=0.0)
    assert torch.equal(generate(gpt, prompt, 10, top_p=1e-6), greedy)


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.9}])
@pytest.mark.parametrize("temperature", [1e-30, 9e-31, 1e-38, 1e-40, 1e-300])
def test_a_tiny_temperature_is_greedy_even_where_float32_cannot_divide_by_it(gpt, temperature, options):
    prompt = torch.randint(100, (4, 5))
    greedy = generate(gpt, prompt, 10, temperature=0.0)
    assert torch.equal(generate(gpt, prompt, 10, temperature=temperature, **options), greedy)


@pytest.mark.parametrize("stop_tokens", [(), (3, 7)])
def test_a_default_device_changes_no_token(gpt, stop_tokens):
    gpt, prompt = reshaped(gpt, "reference", ["window(20)"]), torch.randint(100, (2, 7))
    expected = generate(gpt, prompt, 4, temperature=0.0, stop_tokens=stop_tokens)
    with torch.device("meta"):
        assert torch.equal(generate(gpt, prompt, 4, temperature=0.0, stop_tokens=stop_tokens), expected)


def test_a_stream_that_was_begun_in_inference_mode_may_be_read_on_outside(gpt):
    gpt, prompt = reshaped(gpt, "reference", ["window(20)"]), torch.randint(100, (2, 7))
    with torch.inference_mode():
        tokens = stream(gpt, prompt, 6, temperature=0.0)
        first = next(tokens)
    together = torch.stack([first, *tokens], dim=1)
    assert torch.equal(together, generate(gpt, prompt, 6, temperature=0.0)[:, 7:])


def test_a_default_dtype_changes_no_token(gpt, other_default_dtype):
    gpt, prompt = reshaped(gpt, "reference", ["window(20)"]), torch.randint(100, (40, 7))

    def sample():
        return generate(gpt, prompt, 4, top_p=0.8, generator=torch.Generator().manual_seed(1))

    expected = sample()
    with other_default_dtype():
        assert torch.equal(sample(), expected)


def test_streams_of_one_model_may_overlap_and_leave_its_mode_as_it_was(gpt):
    gpt = reshaped(gpt, "sdpa", dropout=0.5).train()
    tokens = torch.arange(5)[None]
    alone = torch.stack(list(stream(gpt, tokens, 9, temperature=0.0)))
    short, long = (stream(gpt, tokens, n_new, temperature=0.0) for n_new in (3, 9))
    next(short)
    first = next(long)
    list(short)
    assert torch.equal(torch.stack([first, *long]), alone)
    assert all(part.training for part in gpt.modules())


def test_behind_a_half_read_stream_training_goes_on_after_a_generation(gpt):
    tokens = torch.arange(5)[None]
    half_read = stream(gpt.eval(), tokens, 9)
    next(half_read)
    gpt.train()
    generate(gpt, tokens, 3)
    assert all(part.training for part in gpt.modules())
    half_read.close()
    assert all(part.training for part in gpt.modules())


def test_generation_leaves_the_training_mode_as_it_was(gpt):
    gpt.train()
    # as of a part that is not trained
    gpt.blocks[0].eval()
    modes = [module.training for module in gpt.modules()]
    generate(gpt, torch.zeros(1, 1, dtype=torch.long), 2)
    assert [module.training for module in gpt.modules()] == modes


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_refused(gpt, temperature):
    torch.nn.init.constant_(gpt.final_norm.bias, float("nan"))
    with pytest.raises(ValueError, match="logits after the prompt are not finite in float32: use an earlier"):
        generate(gpt, torch.zeros(1, 5, dtype=torch.long), 1, temperature=temperature)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.5}])
def test_logits_that_are_not_finite_behind_some_tokens_end_the_text_with_how_many(gpt, options, wrong):
    # as of positions that training has not seen
    gpt.position_embedding.weight.data[8:] = wrong
    new = stream(gpt, torch.zeros(2, 5, dtype=torch.long), 10, **options)
    tokens = [next(new) for _ in range(4)]
    assert all(((row >= 0) & (row < 100)).all() for row in tokens)
    with pytest.raises(
        ValueError, match="logits after 4 new tokens are not finite in float32: use an earlie"
    ):
        next(new)


def test_a_text_that_has_ended_is_not_asked_for_finite_logits(gpt):
    gpt.position_embedding.weight.data[8:] = float("nan")
    prompt = torch.zeros(1, 5, dtype=torch.long)
    stop = int(generate(gpt, prompt, 2, temperature=0.0)[0, -1])
    assert len(list(stream(gpt, prompt, 10, temperature=0.0, stop_tokens=[stop]))) <= 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_of_ids_that_are_never_drawn_need_not_be_finite(gpt, temperature):
    with torch.no_grad():
        gpt.token_embedding.weight[90:] = float("nan")
    tokens = generate(gpt, torch.zeros(1, 5, dtype=torch.long), 3, temperature=temperature, vocab_size=90)
    assert int(tokens.max()) < 90


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n_new": 36}, "5 prompt tokens and n_new=36 exceed the model's 40 positions: n_new=35 fits"),
        ({"n_new": -1}, "n_new must be at least 0, got -1"),
        ({"n_new": 1, "temperature": float("nan")}, "temperature must be at least 0 and finite, got nan"),
        ({"n_new": 1, "temperature": float("inf")}, "temperature must be at least 0 and finite, got inf"),
        ({"n_new": 1, "temperature": -1.0}, "temperature must be at least 0"),
        ({"n_new": 1, "top_k": 0}, "top_k must be at least 1"),
        ({"n_new": 1, "top_p": 0.0}, r"top_p must be in \(0, 1\]"),
        ({"n_new": 1, "vocab_size": 0}, "vocab_size must be from 1 to the model's 100, or None .* got 0"),
        ({"n_new": 1, "vocab_size": 101}, "got 101"),
        (
            {"n_new": 1, "lengths": torch.tensor([0])},
            r"lengths must be \(1,\) integers, .* got \[0\]",
        ),
        ({"n_new": 1, "lengths": torch.tensor([6])}, r"each from 1 to 5, got \[6\]"),
        ({"n_new": 1, "lengths": torch.tensor([5, 5])}, r"lengths must be \(1,\)"),
        ({"n_new": 1, "lengths": torch.tensor([2.5])}, r"lengths must be \(1,\) integers, .*got \[2.5\]"),
        ({"n_new": 1, "lengths": [5]}, "lengths must be a tensor, got list"),
        ({"n_new": 3.0}, "n_new must be an integer, got 3.0"),
        ({"n_new": 1, "top_k": True}, "top_k must be an integer, got True"),
        ({"n_new": 1, "vocab_size": 5.0}, "vocab_size must be an integer, got 5.0"),
        ({"n_new": 1, "stop_tokens": {3}}, r"stop_tokens must be a sequence of integers, got \{3\}"),
        ({"n_new": 1, "stop_tokens": "ab"}, "stop_tokens must be a sequence of integers, got 'ab'"),
        ({"n_new": 1, "stop_tokens": None}, "stop_tokens must be a sequence of integers, got None"),
    ],
)
def test_impossible_requests_are_refused(gpt, arguments, message):
    with pytest.raises(ValueError, match=message):
        generate(gpt, torch.zeros(1, 5, dtype=torch.long), **arguments)


@pytest.mark.parametrize("tokens", [torch.zeros(5, dtype=torch.long), torch.zeros(1, 5)])
def test_what_is_no_batch_of_token_ids_is_refused(gpt, tokens):
    with pytest.raises(ValueError, match=rf"tokens must be \(B, T\) integers, got {tokens.dtype} of shape"):
        generate(gpt, tokens, 1)
