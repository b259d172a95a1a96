import json
import shlex

import pytest
import torch
from faults import run_training, small_config, write_corpus
from tokenizers import Tokenizer, decoders, models, normalizers

from data.tokenizer import load_tokenizer
from model import GPT, AttentionConfig, ModelConfig
from train.sample import GrowingText, SampleConfig, prompt_ids, sample_text, stream_text
from train.weights import ends_of_text

TEXT = "naïve 漢字 🙂 <|endoftext|>\n\tdef f(x): return x"


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_growing_text_comes_in_whole_characters_and_loses_none(name):
    tokenizer = load_tokenizer(name)
    ids = tokenizer.encode(TEXT).tolist()
    n_prompt = len(tokenizer.encode("naïve"))
    text = GrowingText(tokenizer, ids[:n_prompt])
    pieces = [*(text.add(token) for token in ids[n_prompt:]), text.rest()]
    assert tokenizer.decode(ids[:n_prompt]) + "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory):
    """A tokenizer in the way of Llama 2: of what it does not know each byte is a token."""
    vocab = {"<unk>": 0, "</s>": 1, **{f"<0x{byte:02X}>": 2 + byte for byte in range(256)}}
    vocab |= {letter: len(vocab) + place for place, letter in enumerate("\u2581abcdefghij")}
    model = models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    folder = tmp_path_factory.mktemp("byte_fallback")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return load_tokenizer(str(folder))


@pytest.mark.parametrize(
    ("prompt", "more"),
    [("ab", "🙂 cd"), ("ab 🙂", "🙂 cd"), ("ab é", "é"), ("é", "é"), ("a東", "京 b"), ("a東", "京都")],
)
def test_a_prompt_may_end_in_a_character_of_several_tokens_and_go_on_with_another(
    prompt, more, byte_fallback
):
    n_prompt = len(byte_fallback.encode(prompt))
    ids = byte_fallback.encode(prompt + more).tolist()
    for begin in ([], [byte_fallback.end_of_text]):
        text = GrowingText(byte_fallback, begin + ids[:n_prompt])
        assert "".join([*(text.add(token) for token in ids[n_prompt:]), text.rest()]) == more


class Scripted(GPT):
    """Continues each sequence by the given tokens: row r at step t gives script[r][t]."""

    def __init__(self, script: list[list[int]], prompts: list[int]):
        sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 257, "max_seq_len": 64}
        super().__init__(ModelConfig(**sizes, dropout=0.0), AttentionConfig(implementation="sdpa"))
        self.script, self.prompts = torch.tensor(script), torch.tensor(prompts)

    def hidden_states(self, tokens, *_, caches, **__):
        steps = caches[0].lengths - self.prompts
        wanted = self.script[torch.arange(len(self.script)), steps]
        return wanted[:, None].expand(-1, tokens.shape[1])

    def logits(self, hidden):
        return torch.nn.functional.one_hot(hidden, 257).float()


def greedy(tokens: int) -> SampleConfig:
    return SampleConfig(prompt="", tokens=tokens, temperature=0.0, top_k=None, top_p=None)


def test_prompts_go_on_together_each_to_its_own_end():
    tokenizer = load_tokenizer("bytes")
    end = tokenizer.end_of_text
    script = [[*b"one", end, *b"xyz"], [*"eé".encode(), ord("!"), end, 0, 0], [*b"unfinis"]]
    # a document begins after the end of the one before
    prompts = ["a", "bcd", ""]
    model = Scripted(script, [1 + len(prompt) for prompt in prompts])
    texts = ["", "", ""]
    for number, piece in stream_text(model, tokenizer, greedy(6), prompts, 0):
        texts[number] += piece
    assert texts == ["one", "eé!", "unfini"]


def test_text_is_drawn_with_the_seed_and_the_limits_that_are_asked_for(monkeypatch):
    found = {}
    monkeypatch.setattr(
        "train.sample.stream", lambda *args, **given: found.update(given, n_new=args[2]) or []
    )
    config = SampleConfig(prompt="", tokens=3, temperature=0.5, top_k=7, top_p=0.25)
    list(stream_text(Scripted([[0]], [1]), load_tokenizer("bytes"), config, [""], 11))
    names = ("n_new", "temperature", "top_k", "top_p")
    assert [found[name] for name in names] == [3, 0.5, 7, 0.25]
    assert found["generator"].initial_seed() == 11


def test_a_prompt_stands_after_the_end_of_text_or_what_is_given():
    tokenizer, sizes = load_tokenizer("bytes"), Scripted([[0]], [1]).config
    assert prompt_ids(tokenizer, "a", sizes) == [256, ord("a")]
    assert prompt_ids(tokenizer, "a", sizes, [1, 2]) == [1, 2, ord("a")]
    model = Scripted([[*b"yes", tokenizer.end_of_text]], [3])
    assert (
        "".join(piece for _, piece in stream_text(model, tokenizer, greedy(5), ["a"], 0, begin=[1, 2]))
        == "yes"
    )


def test_a_stop_token_ends_the_text_and_is_not_part_of_it():
    model = Scripted([[*b"stop; here"]], [2])
    pieces = stream_text(model, load_tokenizer("bytes"), greedy(10), ["x"], 0, stop_tokens=(ord(";"),))
    assert "".join(piece for _, piece in pieces) == "stop"


def test_a_character_that_is_cut_off_at_the_end_is_shown_as_such():
    model = Scripted([list("é".encode()[:1]) * 2], [1])
    text = sample_text(model, load_tokenizer("bytes"), greedy(1), 0, mark=lambda: None)
    assert text == "\ufffd"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_with_more_tokens_than_its_tokenizer_gives_text_of_the_tokenizers(temperature):
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 8, "vocab_size": 5000, "max_seq_len": 64, "dropout": 0.0}
    model = GPT(ModelConfig(**sizes), AttentionConfig(implementation="sdpa"))
    config = SampleConfig(prompt="", tokens=50, temperature=temperature, top_k=None, top_p=None)
    assert sample_text(model, load_tokenizer("bytes"), config, 0, mark=lambda: None)


def test_a_prompt_beyond_the_models_positions_is_refused():
    model = Scripted([[0]], [1])
    with pytest.raises(ValueError, match=r"the prompt has 101 tokens, the model 64 positions"):
        list(stream_text(model, load_tokenizer("bytes"), greedy(1), ["x" * 100], 0))


def test_the_command_that_a_run_ends_with_can_be_pasted_whatever_its_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path)
    run_training(small_config("'first try'", 1))
    command = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(command)[2:] == ["python", "-m", "scripts.sample", "run=runs/first try", "prompt=..."]


def test_a_published_model_stops_at_every_token_that_its_folder_names(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert ends_of_text(tmp_path) == {2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    assert ends_of_text(tmp_path) == {2, 5}
    (tmp_path / "config.json").write_text('{"eos_token_id": null}')
    (tmp_path / "generation_config.json").write_text("{}")
    assert ends_of_text(tmp_path) == set()
    (tmp_path / "config.json").write_text('{"eos_token_id": ["2", [2], 2.5, 3]}')
    assert ends_of_text(tmp_path) == {3}
    (tmp_path / "generation_config.json").write_text("")
    with pytest.raises(ValueError, match="generation_config.json is not JSON"):
        ends_of_text(tmp_path)
