"""Hugging Face tokenizers: the tokens of transformers, ids of any size, bound to a file's content."""

import json
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

from data.loader import TokenLoader
from data.manifest import read_manifest, write_manifest
from data.prepare import prepare
from data.shards import HEADER, read_shard, write_shard
from data.tokenizer import encode_documents, load_tokenizer, same_tokens, shard_mark
from scripts.prepare_data import parse

END = "<|endoftext|>"
WORDS = 70_000


def save(folder: Path, vocabulary: tokenizers.Tokenizer, **settings) -> Path:
    folder.mkdir()
    vocabulary.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def bpe(tmp_path_factory) -> Path:
    """A small tokenizer of Llama 3's kind, which puts a token before each text."""
    vocabulary = tokenizers.Tokenizer(models.BPE())
    vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    vocabulary.train_from_iterator([Path(__file__).read_text()], trainer)
    vocabulary.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return save(tmp_path_factory.mktemp("bpe") / "folder", vocabulary, eos_token={"content": END})


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> Path:
    """w0 w1 w2 ..., more than fit uint16."""
    ids = {f"w{i}": i for i in range(WORDS)} | {END: WORDS}
    vocabulary = tokenizers.Tokenizer(models.WordLevel(ids, unk_token=END))
    vocabulary.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return save(tmp_path_factory.mktemp("words") / "folder", vocabulary, eos_token=END)


def test_the_end_of_text_inside_a_document_is_text_however_its_folder_marks_it(bpe, tmp_path):
    vocabulary = tokenizers.Tokenizer.from_file(str(bpe / "tokenizer.json"))
    vocabulary.add_tokens([tokenizers.AddedToken("<|im_end|>", special=False)])
    tokenizer = load_tokenizer(str(save(tmp_path / "chat", vocabulary, eos_token="<|im_end|>")))
    assert tokenizer.end_of_text == vocabulary.token_to_id("<|im_end|>")
    ids = tokenizer.encode("a<|im_end|>b")
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode([*ids, tokenizer.end_of_text]) == "a<|im_end|>b<|im_end|>"


@pytest.mark.parametrize("text", ["", "def f(x):\n    return x", "é 漢字 🙂", " \n\t x"])
def test_tokens_are_those_of_transformers_and_text_survives(bpe, text):
    ours = load_tokenizer(str(bpe))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(bpe / "tokenizer.json"))
    ids = ours.encode(text)
    assert ids.tolist() == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == text
    assert (ours.end_of_text, ours.vocab_size, ours.dtype) == (1, len(theirs), np.uint16)


def test_what_the_file_adds_before_a_text_is_known_and_is_no_part_of_a_document(bpe, words, tmp_path):
    assert load_tokenizer(str(bpe)).begin_of_text == (0,)
    assert load_tokenizer(str(words)).begin_of_text == ()
    vocabulary = tokenizers.Tokenizer.from_file(str(bpe / "tokenizer.json"))
    vocabulary.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, 1)]
    )
    assert load_tokenizer(str(save(tmp_path / "after", vocabulary, eos_token=END))).begin_of_text == ()


def test_special_tokens_in_a_text_are_text(bpe):
    tokenizer = load_tokenizer(str(bpe))
    ids = tokenizer.encode(f"a{END}b<s>")
    assert not {0, 1} & set(ids.tolist())
    assert tokenizer.decode(ids) == f"a{END}b<s>"


def test_half_a_surrogate_pair_is_replaced(bpe):
    tokenizer = load_tokenizer(str(bpe))
    assert tokenizer.decode(tokenizer.encode("half \ud800 pair")) == "half \ufffd pair"


def test_ids_above_65535_go_from_text_to_batches(words, tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(4):
        text = " ".join(f"w{i}" for i in range(number, WORDS, 7))
        (tmp_path / "text" / f"{number}.txt").write_text(text)
    arguments = [f"data.paths=[{tmp_path}/text]", f"data.tokenizer={words}", f"data.folder={tmp_path}/out"]
    config = parse(["data=text", *arguments, "data.validation_fraction=0.25", "data.workers=2"])
    folder = prepare(config)
    assert read_manifest(folder)["vocab_size"] == WORDS + 1
    loader = TokenLoader(
        folder, split="val", seq_len=10_000, sequences_per_step=1, seed=0, tokenizer=str(words), shuffle=False
    )
    tokens, targets = loader.batch(0)
    assert tokens.dtype == torch.int64
    # 0, 7, 14 ... of one document
    assert torch.equal(tokens[0], tokens[0, 0] + 7 * torch.arange(10_000))
    assert int(targets.max()) > 65_535
    # verified, and left as it is
    assert prepare(config) == folder


def test_each_document_is_followed_by_the_end_of_text(words):
    tokenizer = load_tokenizer(str(words))
    tokens = encode_documents(tokenizer, ["w1 w69999", "w3"])
    assert tokens.tolist() == [1, 69_999, WORDS, 3, WORDS]
    assert tokens.dtype == np.uint32


def test_shards_belong_to_the_content_of_the_file_not_to_its_place(words, bpe, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in words.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert load_tokenizer(str(copy)).name == load_tokenizer(str(words)).name == shard_mark(str(words))
    path = tmp_path / "a.bin"
    write_shard(path, np.arange(WORDS, dtype=np.uint32), tokenizer=shard_mark(str(words)))
    assert read_shard(path, tokenizer=shard_mark(str(copy)), verify=True)[-1] == WORDS - 1
    with pytest.raises(ValueError, match=r"was made with tokenizer 'json:.*asks for 'json:"):
        read_shard(path, tokenizer=shard_mark(str(bpe)))


def test_a_folder_whose_files_change_is_read_again(words, bpe, tmp_path, monkeypatch):
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    shutil.copytree(words, "folder")
    assert load_tokenizer("folder").name == shard_mark(str(words))
    assert load_tokenizer("folder") is load_tokenizer("folder")
    shutil.copy(bpe / "tokenizer.json", "folder")
    assert load_tokenizer("folder").name == shard_mark(str(bpe))
    # a link that leads nowhere, as a download of some files leaves, is none of the tokenizer's files
    Path("folder/model.safetensors.index.json").symlink_to("gone")
    assert load_tokenizer("folder").name == shard_mark(str(bpe))
    # another folder of that name
    monkeypatch.chdir(tmp_path / "there")
    shutil.copytree(words, "folder")
    assert load_tokenizer("folder").name == shard_mark(str(words))


def test_shards_of_the_first_version_stay_readable(tmp_path):
    path = tmp_path / "a.bin"
    tokens = np.arange(1000, dtype=np.uint16)
    write_shard(path, tokens, tokenizer="gpt2")
    content = bytearray(path.read_bytes())
    # as they were: version 1, and zeros where the bytes of a token stand now
    struct.pack_into("<I", content, 8, 1)
    struct.pack_into("<I", content, HEADER.size - 4, 0)
    path.write_bytes(content)
    assert np.array_equal(read_shard(path, tokenizer="gpt2", verify=True), tokens)


def test_the_end_of_text_may_be_named_by_number_beside_the_weights(bpe, tmp_path):
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match="names no end of text: put tokenizer_config.json"):
        load_tokenizer(str(folder))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [1, 0]}))
    assert load_tokenizer(str(folder)).end_of_text == 1


@pytest.fixture
def other_end(words, tmp_path) -> Path:
    """The tokenizer.json of words, beside which another token is named as the end of text."""
    vocabulary = tokenizers.Tokenizer.from_file(str(words / "tokenizer.json"))
    return save(tmp_path / "other_end", vocabulary, eos_token="w7")


def test_two_folders_with_one_vocabulary_and_another_end_of_text_are_not_the_same(words, other_end):
    tokenizer, other = load_tokenizer(str(words)), load_tokenizer(str(other_end))
    assert tokenizer.name == other.name
    assert same_tokens(tokenizer, tokenizer)
    assert not same_tokens(tokenizer, other)


def test_prepared_text_is_refused_to_a_tokenizer_with_another_end_of_text(words, other_end, tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text(f"w{number} w7")
    arguments = [
        "data=text",
        f"data.paths=[{tmp_path}/text]",
        f"data.folder={tmp_path}/out",
        "data.workers=1",
    ]
    folder = prepare(parse([*arguments, f"data.tokenizer={words}"]))
    manifest = read_manifest(folder)
    assert manifest["end_of_text"] == WORDS
    other = parse([*arguments, f"data.tokenizer={other_end}"])
    message = (
        rf"data\.folder=.*out' was prepared with token {WORDS} as the end of text, which is 7 in data\.t"
    )
    with pytest.raises(ValueError, match=message):
        prepare(other)
    # of a time when it was not kept
    del manifest["end_of_text"]
    write_manifest(folder, manifest)
    assert prepare(other) == folder


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"is not JSON \(.*\)"),
        ("\xff", r"is not JSON \(.*\)"),
        ("[]", "must hold an object, got list"),
        ('{"eos_token": 3}', "must name the end of text by a text, got eos_token=3"),
        ('{"eos_token": {"id": 3}}', r"by a text, got eos_token={'id': 3}"),
        ('{"eos_token_id": "1"}', "must be a token, from 0 to 399, got '1'"),
        ('{"eos_token_id": []}', r"must be a token, from 0 to 399, got \[\]"),
        ('{"eos_token_id": [400]}', r"must be a token, from 0 to 399, got 400"),
    ],
)
def test_a_damaged_file_beside_it_is_refused_by_name(bpe, tmp_path, text, message):
    (tmp_path / "tokenizer.json").write_bytes((bpe / "tokenizer.json").read_bytes())
    path = tmp_path / "tokenizer_config.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=f"^{path}:? .*{message}: copy it again from its model"):
        load_tokenizer(str(tmp_path))


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is no tokenizer .* copy it again"):
        load_tokenizer(str(tmp_path))


def test_a_tokenizer_that_cuts_and_fills_texts_for_its_model_does_neither_here(bpe, tmp_path):
    vocabulary = tokenizers.Tokenizer.from_file(str(bpe / "tokenizer.json"))
    vocabulary.enable_truncation(max_length=4)
    vocabulary.enable_padding(length=64)
    folder = save(tmp_path / "cuts", vocabulary, eos_token={"content": END})
    text = "def test(x): return x + 1"
    cut, whole = (load_tokenizer(str(place)).encode(text).tolist() for place in (folder, bpe))
    assert cut == whole
    assert len(whole) > 4
