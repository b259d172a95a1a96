"""data/prepare.py: a corpus is prepared once, whole, the same each time, and never over anything else."""

import json
import logging
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from data import encoder
from data.child import ctrl_c_waits
from data.manifest import SPLITS, corpus_digest, read_manifest, write_manifest
from data.prepare import DataConfig, prepare
from data.shards import HEADER_BYTES, read_shard, write_shard
from data.sources import fingerprint, walk
from data.tokenizer import load_tokenizer

NEWER = ('{"format": "nanoflash corpus", "version": 9}', "must have version 1, got 9")
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def config(tmp_path) -> DataConfig:
    """200 documents, the first two of them equal."""
    text = tmp_path / "text"
    text.mkdir()
    rng = random.Random(0)
    for i in range(200):
        words = "same" if i < 2 else " ".join(rng.choices(["alpha", "beta", "gamma\n", "delta"], k=200))
        (text / f"{i:03d}.txt").write_text(words)
    return text_config(text, tmp_path / "shards")


def text_config(text: Path, folder: Path, **changes) -> DataConfig:
    values = {
        "source": "text",
        "paths": [str(text)],
        "text_field": "text",
        "dataset": "",
        "dataset_name": "",
        "folder": str(folder),
        "tokenizer": "bytes",
        "validation_fraction": 0.1,
        "shard_tokens": 50_000,
        "max_documents": None,
        "workers": 1,
        "seed": 0,
    }
    return DataConfig(**(values | changes))


def shard_paths(folder: Path, split: str) -> list[Path]:
    return [folder / shard["file"] for shard in read_manifest(folder)["splits"][split]["shards"]]


def tokens_of(folder: Path, split: str, tokenizer: str = "bytes") -> np.ndarray:
    return np.concatenate([read_shard(path, tokenizer=tokenizer) for path in shard_paths(folder, split)])


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def start(config: DataConfig, measure: str = "") -> subprocess.Popen:
    """Another process that prepares config, then runs measure."""
    code = (
        "import json, logging; from data.prepare import DataConfig, prepare\n"
        "logging.basicConfig(level='INFO')\n"
        f"prepare(DataConfig(**json.loads({json.dumps(asdict(config))!r})))\n{measure}"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


@pytest.mark.parametrize("split", SPLITS)
def test_the_digest_of_a_corpus_tells_of_a_token_that_changed_in_either_split(tmp_path, split):
    digests = set()
    for changed in (0, 1):
        splits = {}
        for name in SPLITS:
            folder = tmp_path / f"{changed}"
            folder.mkdir(exist_ok=True)
            write_shard(folder / name, np.array([5, changed * (name == split)], "<u2"), tokenizer="gpt2")
            splits[name] = {"shards": [{"file": name, "tokens": 2}]}
        write_manifest(folder, {"config": {}, "splits": splits})
        digests.add(corpus_digest(folder))
    assert len(digests) == 2


def test_text_is_on_the_disk_before_its_folder_has_its_name(config, monkeypatch):
    folder, synced = Path(config.folder), []

    def fsync(number: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{number}"))
        synced.append((name, folder.exists(), os.fstat(number).st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    prepare(config)
    manifest = folder / "manifest.json"
    partial = folder.with_name(folder.name + ".partial") / manifest.name
    assert synced[-2] == (partial, False, manifest.stat().st_size)
    assert synced[-1][:2] == (folder.parent, True)


def test_both_splits_hold_each_document_once_and_whole(config):
    folder = prepare(config)
    documents = {}
    for split in SPLITS:
        text = load_tokenizer("bytes").decode(tokens_of(folder, split))
        assert text.endswith("<|endoftext|>")
        documents[split] = text.removesuffix("<|endoftext|>").split("<|endoftext|>")
    expected = {path.read_text() for path in Path(config.paths[0]).iterdir()}
    assert len(documents["train"]) + len(documents["val"]) == len(expected) == 199
    assert set(documents["train"]) | set(documents["val"]) == expected


def test_the_manifest_says_what_the_shards_hold(config):
    folder = prepare(config)
    manifest = read_manifest(folder)
    assert manifest["left_out"] == {"duplicate": 1}
    assert manifest["tokenizer"] == "bytes"
    for split in SPLITS:
        tokens = tokens_of(folder, split)
        assert manifest["splits"][split]["tokens"] == len(tokens)
        assert manifest["splits"][split]["documents"] == (tokens == 256).sum()
    # 200 KB of tokens in shards of 50,000
    assert len(shard_paths(folder, "train")) > 3


def test_the_validation_share_is_about_what_was_asked(config):
    folder = prepare(config)
    train, val = (len(tokens_of(folder, split)) for split in SPLITS)
    assert 0.09 < val / (train + val) <= 0.101


@pytest.mark.parametrize(("n_chunks", "n_workers"), [(7, 4), (2, 2), (0, 0)])
def test_workers_start_together_and_no_more_than_have_work(monkeypatch, n_chunks, n_workers):
    events = []

    class Worker:
        def __init__(self, tokenizer, dtype):
            events.append("start")
            self.sent = []

        def send(self, chunk):
            events.append("send")
            self.sent.append(chunk.texts)

        def receive(self):
            return np.array([len(text) for text in self.sent.pop(0)])

        def end(self):
            events.append("end")

    monkeypatch.setattr(encoder, "_Worker", Worker)
    monkeypatch.setattr(encoder, "CHUNK_CHARACTERS", 1)
    texts = [("train", "x" * length) for length in range(1, n_chunks + 1)]
    tokens = [int(found[0]) for _, found in encoder.encode_in_order(texts, "bytes", 4)]
    assert tokens == list(range(1, n_chunks + 1))
    # the first to be sent something would else keep the others from starting until it has begun to read
    assert events == ["start"] * n_workers + ["send"] * n_chunks + ["end"] * n_workers


def test_the_bytes_do_not_depend_on_the_number_of_workers(config, tmp_path, monkeypatch):
    # several chunks for each worker
    monkeypatch.setattr("data.encoder.CHUNK_CHARACTERS", 10_000)
    with monkeypatch.context() as alone:
        # one worker is this process, which may be a daemon
        alone.setattr(encoder, "_Worker", None)
        one = prepare(replace(config, tokenizer="gpt2"))
    three = prepare(replace(config, tokenizer="gpt2", workers=3, folder=str(tmp_path / "three")))
    assert contents(one) == contents(three)


def test_a_second_call_does_nothing(config):
    folder = prepare(config)
    before = {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())}
    started = time.monotonic()
    assert prepare(config) == folder
    assert time.monotonic() - started < 1
    assert {path: path.stat().st_mtime_ns for path in (folder, *folder.iterdir())} == before


def test_prepared_text_is_enough_without_its_files(config, caplog):
    prepare(config)
    for path in Path(config.paths[0]).iterdir():
        path.unlink()
    Path(config.paths[0]).rmdir()
    assert prepare(config).is_dir()
    assert not caplog.records


def test_files_that_changed_since_are_told(config, caplog):
    prepare(config)
    (Path(config.paths[0]) / "new.txt").write_text("new")
    prepare(config)
    assert "changed or moved since" in caplog.text
    assert "delete it to use them" in caplog.text


def test_a_file_whose_name_is_not_utf8_is_prepared_as_others_are(config, caplog):
    (Path(config.paths[0]) / os.fsdecode(b"caf\xe9.txt")).write_text("coffee")
    folder = prepare(config)
    assert sum(content["documents"] for content in read_manifest(folder)["splits"].values()) == 200
    assert prepare(config) == folder
    assert not caplog.records


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"validation_fraction": 0.2},
        {"max_documents": 10},
        {"paths": ["."]},
        {"tokenizer": "gpt2"},
    ],
)
def test_a_folder_of_another_configuration_is_refused_by_key(config, change):
    before = contents(prepare(config))
    key, value = next(iter(change.items()))
    with pytest.raises(ValueError, match=rf"was prepared with data\.{key}=.*, this run has ") as caught:
        prepare(replace(config, **change))
    assert repr(value) in str(caught.value)
    assert "choose another data.folder" in str(caught.value)
    assert contents(Path(config.folder)) == before


def test_a_misspelt_path_is_told_as_one_and_not_as_a_reason_to_delete_prepared_text(config):
    before = contents(prepare(config))
    misspelt = replace(config, paths=[f"{config.paths[0]}s"])
    with pytest.raises(
        ValueError, match=r"^data\.paths names '.*texts', which does not exist .*: correct it$"
    ):
        prepare(misspelt)
    assert contents(Path(config.folder)) == before


def test_a_folder_is_found_again_however_its_paths_are_written(config, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    before = contents(prepare(config))
    for path in (f"{config.paths[0]}/", "text", "./text", "shards/../text"):
        prepare(replace(config, paths=[path]))
    assert contents(Path(config.folder)) == before
    # in a manifest of a time when it was taken of the paths as they were written
    manifest = read_manifest(Path(config.folder))
    manifest["config"]["paths"] = ["text"]
    manifest["source_fingerprint"] = fingerprint(walk(Path("text"), (".txt",), Counter()), as_written=True)
    write_manifest(Path(config.folder), manifest)
    prepare(config)
    assert not caplog.records
    (tmp_path / "text" / "new.txt").write_text("new")
    prepare(config)
    assert "changed or moved since" in caplog.text


def test_a_folder_prepared_with_values_that_its_source_does_not_read_is_found_again(config):
    folder = prepare(config)
    manifest = read_manifest(folder)
    assert not {"dataset", "dataset_name"} & set(manifest["config"])
    # as all were kept once, and one could be given in vain
    manifest["config"] |= {"dataset": "", "dataset_name": "given in vain"}
    write_manifest(folder, manifest)
    before = contents(folder)
    prepare(config)
    assert contents(folder) == before


def test_a_folder_of_the_user_is_refused_and_left_alone(config):
    folder = Path(config.folder)
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    with pytest.raises(
        ValueError, match=r"data\.folder='.*shards' was not made by prepare, .*: name a new folder"
    ):
        prepare(config)
    assert contents(folder) == {"thesis.txt": b"mine"}


def test_a_prepared_folder_whose_name_ends_as_that_of_a_leftover_is_left_alone(config, tmp_path):
    partial = prepare(replace(config, folder=f"{config.folder}.partial"))
    before = contents(partial)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "a.txt").touch()
    for paths in (config.paths, [str(empty)]):
        with pytest.raises(
            ValueError, match=r"shards\.partial was not made by prepare: move it away, or choose"
        ):
            prepare(replace(config, paths=paths))
        assert contents(partial) == before
    assert not Path(config.folder).exists()


def test_the_working_directory_is_not_replaced(config, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for folder in (".", str(tmp_path / "here")):
        with pytest.raises(
            ValueError, match=r"data\.folder='.*' is the working directory.*data\.folder=text"
        ):
            prepare(replace(config, folder=folder))
    assert prepare(replace(config, folder="text")) == tmp_path / "here" / "text"


def test_a_tilde_is_the_home_folder(config, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "text")
    assert prepare(replace(config, folder="~/shards", paths=["~/text"])) == tmp_path / "shards"
    assert prepare(config) == tmp_path / "shards", "however the paths are written"
    assert not Path("~").exists()
    (tmp_path / "tokenizer.json").write_text("{}")
    kinds = {"source": "huggingface", "paths": [], "dataset": "~/shards"}
    there = text_config(tmp_path, tmp_path, tokenizer="~", **kinds)
    assert (there.tokenizer, there.dataset) == (str(tmp_path), str(tmp_path / "shards"))
    assert text_config(tmp_path, tmp_path, **kinds | {"dataset": "owner/name"}).dataset == "owner/name"


def test_a_folder_that_cannot_be_made_is_refused_by_its_key(config, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"data\.folder='.*file/a/b' cannot be written .*: name a folder in"):
        prepare(replace(config, folder=str(tmp_path / "file" / "a" / "b")))
    assert (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_is_told_with_the_key_and_the_way_out_and_leaves_nothing(config, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # no file may grow beyond it: the nearest to a full disk that needs none
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    message = (
        r"^data\.folder='.*shards' was not written \(.*File too large\): make room there, or name a folder"
    )
    try:
        with pytest.raises(OSError, match=message):
            prepare(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_another_manifest_is_refused_and_left_alone(config):
    folder = Path(config.folder)
    folder.mkdir()
    cut = ('{"format": "nanoflash corpus"}', "must have version 1, got None")
    empty = (
        '{"format": "nanoflash corpus", "version": 1, "splits": {}}',
        r"is damaged \(it lacks config, splits\)",
    )
    other = ('{"name": "a web app"}', "is no manifest of ours")
    for text, match in (other, ("{", r"is damaged \("), NEWER, cut, empty):
        (folder / "manifest.json").write_text(text)
        with pytest.raises(ValueError, match=match):
            prepare(config)
        assert contents(folder) == {"manifest.json": text.encode()}


def test_the_name_of_the_temporary_folder_may_be_taken_by_the_user(config, tmp_path):
    partial = tmp_path / "shards.partial"
    partial.mkdir()
    (partial / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"shards\.partial was not made by prepare: move it away"):
        prepare(config)
    assert contents(partial) == {"thesis.txt": b"mine"}


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_to_a_folder_stays_and_the_text_goes_where_it_leads(config, tmp_path, exists):
    place, link = tmp_path / "large_disk" / "shards", Path(config.folder)
    place.parent.mkdir()
    if exists:
        place.mkdir()
    link.symlink_to(place)
    prepare(config)
    assert link.is_symlink()
    before = contents(place)
    assert "manifest.json" in before
    prepare(config)
    assert contents(place) == before


def test_a_mounted_disk_is_refused_before_any_work_and_a_folder_on_it_is_named(config, monkeypatch):
    Path(config.folder).mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: str(path) == config.folder)
    with pytest.raises(ValueError, match=f"is a mount point.*data.folder={config.folder}/text"):
        prepare(replace(config, paths=["missing"]))
    assert prepare(replace(config, folder=f"{config.folder}/text")).is_dir()


def test_an_empty_folder_is_used(config):
    Path(config.folder).mkdir()
    assert prepare(config).is_dir()


def test_a_corrupt_shard_is_found_before_it_is_used(config):
    path = shard_paths(prepare(config), "train")[1]
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + 1000)
        file.write(b"\xff\xff")
    with pytest.raises(ValueError, match=r"train_00001\.bin is corrupt.*delete the folder"):
        prepare(config)


def test_a_truncated_shard_is_found_before_it_is_used(config):
    path = shard_paths(prepare(config), "val")[0]
    os.truncate(path, 1000)
    with pytest.raises(ValueError, match=r"val_00000\.bin is cut short.*delete the folder"):
        prepare(config)


def test_a_missing_shard_is_found_before_it_is_used(config):
    shard_paths(prepare(config), "train")[0].unlink()
    with pytest.raises(ValueError, match=r"lacks \['train_00000\.bin'\]: delete it"):
        prepare(config)


def test_a_missing_path_is_refused_and_leaves_nothing(config, tmp_path):
    with pytest.raises(ValueError, match=r"data\.paths names '.*nowhere', which does not exist"):
        prepare(replace(config, paths=[str(tmp_path / "nowhere")]))
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_an_empty_corpus_is_refused_and_leaves_nothing(config, tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "a.txt").write_text(" \n")
    (empty / "b.txt").write_bytes(b"\xff")
    with pytest.raises(
        ValueError, match=r"data\.paths=.*empty.* holds no text, left out: .*'undecodable': 1"
    ):
        prepare(replace(config, paths=[str(empty)]))
    assert {path.name for path in tmp_path.iterdir()} == {"text", "empty"}


def test_a_field_of_numbers_alone_is_refused_with_the_key_that_names_it(config, tmp_path):
    numbers = tmp_path / "numbers.jsonl"
    numbers.write_text('{"text": 3}\n{"text": 4}\n')
    with pytest.raises(ValueError, match=r"holds no text, left out: {'no text in data\.text_field': 2}"):
        prepare(replace(config, paths=[str(numbers)]))


def test_a_corpus_of_copies_of_one_document_is_refused_with_what_was_left_out(config, tmp_path):
    copies = tmp_path / "copies"
    copies.mkdir()
    for name in ("a.txt", "b.txt"):
        (copies / name).write_text("the same")
    with pytest.raises(ValueError, match=r"at least 2, got 1: .*; left out: {'duplicate': 1}"):
        prepare(replace(config, paths=[str(copies)]))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"source": "wikipedia"}, r"data\.source must be one of \('pystdlib', .*got 'wikipedia'"),
        (
            {"tokenizer": "gpt3"},
            r"data\.tokenizer must be one of .* or a folder with tokenizer\.json, got 'gpt3'",
        ),
        ({"validation_fraction": 0.0}, r"data\.validation_fraction must be in \(0, 0\.5\], got 0\.0"),
        ({"validation_fraction": 1.5}, r"data\.validation_fraction .* got 1\.5"),
        ({"validation_fraction": float("nan")}, r"data\.validation_fraction .* got nan"),
        ({"shard_tokens": 0}, r"data\.shard_tokens must be at least 1, got 0"),
        ({"max_documents": 1}, r"data\.max_documents must be null or at least 2, got 1"),
        ({"workers": 0}, r"data\.workers must be null or at least 1, got 0"),
        ({"paths": []}, r"data\.paths must name files or folders, as in 'data\.paths=\[my_folder\]'"),
        (
            {"paths": ["text", ""]},
            r"data\.paths .*got an empty text in \['text', ''\]: use '\.' for the working",
        ),
        ({"source": "pystdlib"}, r"data\.paths must .* be empty otherwise"),
        ({"source": "huggingface", "paths": []}, r"data\.dataset must name a data set"),
        ({"dataset": "a/b"}, r"data\.dataset .*be empty otherwise, got 'a/b'"),
        ({"dataset_name": "b"}, r"data\.dataset_name='b' has no effect with data\.source=text, only with"),
        (
            {"source": "pystdlib", "paths": [], "dataset_name": "b"},
            r"data\.dataset_name='b' has no effect with data\.source=pystdlib.*: leave it '', or use another",
        ),
        (
            {"source": "pypackages", "paths": [], "text_field": "content"},
            r"data\.text_field='content' has no effect .*, only with text and huggingface: leave it 'text'",
        ),
        ({"folder": ""}, r"data\.folder must name the folder"),
    ],
)
def test_a_bad_value_is_refused_by_key_and_value(config, change, match):
    with pytest.raises(ValueError, match=match):
        replace(config, **change)


def test_a_hugging_face_data_set_is_prepared_from_a_local_folder(config, tmp_path, caplog):
    data_set = tmp_path / "set"
    data_set.mkdir()
    lines = [json.dumps({"content": f"document {i}"}) for i in range(100)]
    (data_set / "train.jsonl").write_text("\n".join(lines))
    hub = {"source": "huggingface", "paths": [], "dataset": str(data_set), "text_field": "content"}
    folder = prepare(replace(config, **hub, max_documents=40))
    assert sum(content["documents"] for content in read_manifest(folder)["splits"].values()) == 40
    assert not caplog.records
    # a second call looks at the data set only to tell whether it has changed
    (data_set / "train.jsonl").write_text("{")
    assert prepare(replace(config, **hub, max_documents=40)) == folder
    assert "the files of source huggingface changed or moved since" in caplog.text
    # of older folders, and where the data set is gone, that cannot be told
    caplog.clear()
    manifest = read_manifest(folder)
    write_manifest(folder, manifest | {"source_fingerprint": None})
    prepare(replace(config, **hub, max_documents=40))
    write_manifest(folder, manifest)
    shutil.rmtree(data_set)
    prepare(replace(config, **hub, max_documents=40))
    assert not caplog.records


def large_corpus(folder: Path, megabytes: int) -> Path:
    """A .jsonl file of so many MB of random text, 16 KB a document."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{megabytes}.jsonl"
    with path.open("w") as file:
        for _ in range(64 * megabytes):
            file.write(json.dumps({"text": os.urandom(8192).hex()}) + "\n")
    return path


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    # VmHWM and not ru_maxrss, which a process inherits from the one that starts it
    measure = (
        "import resource; status = open('/proc/self/status').read()\n"
        "children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss\n"
        "print(status.split('VmHWM:')[1].split()[0], children)"
    )
    peaks = []
    for megabytes in (8, 64):
        corpus = large_corpus(tmp_path / "text", megabytes)
        config = text_config(corpus, tmp_path / f"shards{megabytes}", workers=2, shard_tokens=100_000_000)
        output, errors = start(config, measure).communicate(timeout=150)
        peaks.append([int(kilobytes) for kilobytes in output.split()])
        assert sum(peaks[-1]) < 300_000, errors
    growth = [large - small for small, large in zip(*peaks, strict=True)]
    assert max(growth) < 10_000, f"{peaks} KB of the parent and a worker"


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for(condition, seconds: float = 150) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


def test_a_killed_run_leaves_no_process_and_starts_over_cleanly(tmp_path):
    config = text_config(
        large_corpus(tmp_path / "text", 24), tmp_path / "shards", workers=2, shard_tokens=4_000_000
    )
    process = start(config)
    partial = tmp_path / "shards.partial"
    # in the middle: one shard is whole, the next is being written
    wait_for(lambda: (partial / "train_00000.bin").exists())
    workers = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(workers) >= 2
    wait_for(lambda: not any(alive(worker) for worker in workers), seconds=5)
    assert not Path(config.folder).exists()
    assert partial.exists()

    folder = prepare(replace(config, workers=1))
    assert not partial.exists()
    undisturbed = prepare(replace(config, workers=1, folder=str(tmp_path / "undisturbed")))
    assert contents(folder) == contents(undisturbed)


def test_several_processes_prepare_one_folder_once(tmp_path):
    config = text_config(large_corpus(tmp_path / "text", 4), tmp_path / "shards")
    processes = [start(config) for _ in range(3)]
    logs = [process.communicate(timeout=150)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], logs
    assert sum("INFO:data.prepare:prepared" in log for log in logs) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shards", "text"]
    assert prepare(config).is_dir()


def test_a_killed_worker_is_told_in_one_line_with_the_way_out(tmp_path):
    values = {"paths": f"[{large_corpus(tmp_path / 'text', 24)}]", "folder": tmp_path / "shards"}
    values |= {"tokenizer": "bytes", "workers": 2, "shard_tokens": 1_000_000}
    words = [f"data.{key}={value}" for key, value in values.items()]
    command = [sys.executable, "-m", "scripts.prepare_data", "data=text", *words]
    process = subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE)
    wait_for(lambda: (tmp_path / "shards.partial" / "train_00000.bin").exists())
    for worker in children(process.pid):
        os.kill(worker, signal.SIGKILL)
    errors = process.communicate(timeout=30)[1]
    assert process.returncode == 2, errors
    assert errors.endswith(
        "error: a tokenizing process ended with code -9; -9 most likely means too little memory: lower "
        "data.workers\n"
    )
    assert "Traceback" not in errors
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def test_what_was_done_is_logged(config, caplog):
    with caplog.at_level(logging.INFO):
        prepare(config)
    train, val = (len(tokens_of(Path(config.folder), split)) for split in SPLITS)
    told = f"{train:,} tokens for training, {val:,} for validation ({100 * val / (train + val):.1f}%)"
    assert told in caplog.text
    assert "left out {'duplicate': 1}" in caplog.text


def test_ctrl_c_waits_although_another_thread_takes_the_signal():
    """As a library's does; a worker would be started with half of what it begins with."""
    ends, reached = threading.Event(), []
    threading.Thread(target=ends.wait, daemon=True).start()

    def start():
        with ctrl_c_waits():
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.1)
            reached.append(True)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            start()
    finally:
        signal.signal(signal.SIGINT, before)
        ends.set()
    assert reached
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_the_split_is_of_the_documents_that_are_prepared(config, tmp_path):
    path = tmp_path / "some.jsonl"
    texts = [f"document {i}" for i in range(10)] + ["x" * 10_000]
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    folder = prepare(replace(config, paths=[str(path)], max_documents=10, validation_fraction=0.2))
    found = read_manifest(folder)["splits"]
    assert {name: split["documents"] for name, split in found.items()} == {"train": 8, "val": 2}


def test_another_seed_holds_out_other_documents(config, tmp_path):
    folders = [prepare(replace(config, seed=seed, folder=str(tmp_path / f"seed{seed}"))) for seed in (0, 1)]
    first, second = ((folder / "val_00000.bin").read_bytes() for folder in folders)
    assert first != second
