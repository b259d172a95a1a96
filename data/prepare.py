"""Prepare a corpus: documents in, shards of tokens and a manifest out, once.

Read in this order: sources (documents), split (duplicates, validation), encoder (tokens), shards (files).
"""

import fcntl
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm

from data.encoder import encode_in_order
from data.manifest import FILE, SPLITS, read_manifest, write_manifest
from data.shards import ShardWriter, read_shard, sync_folder
from data.sources import HuggingFace, PythonFiles, Source, TextFiles, installed_packages, standard_library
from data.split import Plan, plan_validation, unique_documents
from data.tokenizer import TOKENIZERS, check_tokenizer, load_tokenizer, shard_mark

log = logging.getLogger(__name__)

SOURCES = ("pystdlib", "pypackages", "text", "huggingface")
# for keys that not every source reads: the sources that do
READ_BY = {
    "paths": ("text",),
    "text_field": ("text", "huggingface"),
    "dataset": ("huggingface",),
    "dataset_name": ("huggingface",),
}
# how data is prepared, not what it is
FREE_KEYS = ("folder", "workers")
LOCK = ".lock"


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Which text, how it is split and tokenized, and where the shards go. Values are in conf/data/."""

    # one of SOURCES: the standard library, every installed package, the user's files, a Hugging Face data set
    source: str
    # files and folders; for source text only, otherwise empty
    paths: list[str]
    # the field of a .jsonl line, .parquet row or data set row that holds the text; for sources text and
    # huggingface only, otherwise "text"
    text_field: str
    # "owner/name" on the hub or a local folder; for source huggingface only, otherwise empty
    dataset: str
    # which configuration of dataset, empty if it has just one; for source huggingface only, otherwise empty
    dataset_name: str
    # where the shards go: a new folder, or one that the same configuration prepared
    folder: str
    # gpt2, bytes, or a Hugging Face folder with tokenizer.json
    tokenizer: str
    # share of the text, in whole documents or packages; 0 < validation_fraction <= 0.5
    validation_fraction: float
    # tokens per shard, 2 bytes each, or 4 with a vocabulary of more than 65,536
    shard_tokens: int
    # stop after this many documents, not counting duplicates; null: all
    max_documents: int | None
    # tokenizing processes; null: all cores
    workers: int | None
    # seeds the validation split, not the run: runs with different seeds share a corpus
    seed: int

    def __post_init__(self) -> None:
        # a shell does not expand ~ inside KEY=VALUE
        self.folder, self.tokenizer, self.dataset = map(
            os.path.expanduser, (self.folder, self.tokenizer, self.dataset)
        )
        if self.source not in SOURCES:
            raise ValueError(f"data.source must be one of {SOURCES}, got {self.source!r}")
        check_tokenizer(self.tokenizer)
        if bool(self.paths) != (self.source == "text"):
            raise ValueError(
                "data.paths must name files or folders, as in 'data.paths=[my_folder]', for data.source=text "
                f"and be empty otherwise, got {list(self.paths)} with data.source={self.source}"
            )
        # an empty path would mean the working directory
        if not all(self.paths):
            raise ValueError(
                f"data.paths must name files or folders, got an empty text in {list(self.paths)}: use '.' "
                "for the working directory"
            )
        if bool(self.dataset) != (self.source == "huggingface"):
            raise ValueError(
                f"data.dataset must name a data set for data.source=huggingface and be empty otherwise, "
                f"got {self.dataset!r} with data.source={self.source}"
            )
        for key, unset in (("text_field", "text"), ("dataset_name", "")):
            value, readers = getattr(self, key), READ_BY[key]
            if value != unset and self.source not in readers:
                raise ValueError(
                    f"data.{key}={value!r} has no effect with data.source={self.source}, only with "
                    f"{' and '.join(readers)}: leave it {unset!r}, or use another source"
                )
        if not self.folder:
            raise ValueError("data.folder must name the folder for the shards, got an empty text")
        if not 0 < self.validation_fraction <= 0.5:
            raise ValueError(f"data.validation_fraction must be in (0, 0.5], got {self.validation_fraction}")
        if self.shard_tokens < 1:
            raise ValueError(f"data.shard_tokens must be at least 1, got {self.shard_tokens}")
        if self.max_documents is not None and self.max_documents < 2:
            raise ValueError(f"data.max_documents must be null or at least 2, got {self.max_documents}")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"data.workers must be null or at least 1, got {self.workers}")


def is_new(config: DataConfig) -> bool:
    """Whether config.folder is missing or empty, so that text would be prepared."""
    folder = Path(config.folder)
    return not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))


def prepare(config: DataConfig, begins: Callable[[], None] = lambda: None) -> Path:
    """The folder with the shards of both splits and their manifest, created if it does not exist yet.

    A folder that the same configuration prepared is verified and left as it is. Otherwise the shards are
    written to a folder beside it, which is renamed when complete: an interrupted preparation starts over, and
    of several processes one prepares while the others wait. Equal configurations give equal bytes, whatever
    config.workers.

    begins: called before text is read, if any is, when the source and the folder have been found good.

    Raises ValueError if the folder holds anything else or damaged shards, if the source has no documents, or
    if a path is missing; OSError if the disk is full. Nothing that was there before is changed.
    """
    # the finished folder goes to the target of a link, and does not replace the link itself
    folder = Path(config.folder).resolve()
    if _is_prepared(folder, config):
        return folder
    if folder.is_mount():
        raise ValueError(
            f"data.folder={config.folder!r} is a mount point, which no folder can replace: use "
            f"data.folder={folder / 'text'}"
        )
    if folder == Path.cwd():
        raise ValueError(
            f"data.folder={config.folder!r} is the working directory, which must stay: use a folder in "
            "it, as data.folder=text"
        )
    _open_source(config).check()
    partial = folder.with_name(folder.name + ".partial")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(partial)
    except OSError as error:
        raise ValueError(
            f"data.folder={config.folder!r} cannot be written ({error}): name a folder in a place where this "
            "user may write"
        ) from error
    with lock:
        try:
            # another process may have finished it while this one waited
            finished = _is_prepared(folder, config)
            # leftovers of a run that was killed
            _clear(partial)
            if not finished:
                begins()
                _write_corpus(partial, config)
        except BaseException:
            _remove(partial)
            raise
        if finished:
            _remove(partial)
        else:
            # the folder is missing or empty, and rename replaces an empty one; it refuses any other
            partial.rename(folder)
            # only a leftover holds one: this folder may have a name that ends in .partial
            (folder / LOCK).unlink()
            sync_folder(folder.parent)
    return folder


def _is_prepared(folder: Path, config: DataConfig) -> bool:
    if is_new(config):
        return False
    if not (folder / FILE).is_file():
        raise ValueError(
            f"data.folder={str(folder)!r} was not made by prepare, it has no {FILE}: name a new folder, or "
            "an empty one"
        )
    manifest = read_manifest(folder)
    for key, now in identity(asdict(config)).items():
        then = manifest["config"].get(key)
        if key == "tokenizer" and not {then, now} & set(TOKENIZERS):
            # both are folders, which may move: the digest that shards carry is compared below
            continue
        if spelled_out(then) != spelled_out(now):
            if key == "paths":
                # a slip in a path must not cost the prepared text
                _open_source(config).check()
            raise ValueError(
                f"data.folder={str(folder)!r} was prepared with data.{key}={then!r}, this run has {now!r}: "
                "choose another data.folder, or delete that one"
            )
    paths = [folder / shard["file"] for split in SPLITS for shard in manifest["splits"][split]["shards"]]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise ValueError(f"data.folder={str(folder)!r} lacks {missing}: delete it, it is prepared again then")
    mark = shard_mark(config.tokenizer)
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda path: read_shard(path, tokenizer=mark, verify=True), paths))
    _refuse_other_end(manifest, config)
    if _has_changed(manifest, config):
        log.warning(
            "the files of source %s changed or moved since %s was prepared: delete it to use them",
            config.source,
            folder,
        )
    return True


def _has_changed(manifest: dict[str, Any], config: DataConfig) -> bool:
    then, source = manifest.get("source_fingerprint"), _open_source(config)
    # older manifests have none of a data set in a folder
    if then is None or source.fingerprint() in (None, then):
        return False
    # an older manifest's fingerprint is of the paths as they were written
    before = TextFiles(manifest["config"].get("paths", []), config.text_field)
    return before.fingerprint(as_written=True) != then


def _refuse_other_end(manifest: dict[str, Any], config: DataConfig) -> None:
    # a named tokenizer has only one; older manifests do not record it, and fit any
    if config.tokenizer in TOKENIZERS or "end_of_text" not in manifest:
        return
    then, now = manifest["end_of_text"], load_tokenizer(config.tokenizer).end_of_text
    if then != now:
        raise ValueError(
            f"data.folder={config.folder!r} was prepared with token {then} as the end of text, which is "
            f"{now} in data.tokenizer={config.tokenizer!r}: put the eos_token of then into its "
            "tokenizer_config.json, or choose another data.folder"
        )


def spelled_out(value: Any) -> Any:
    """The value of a key that may hold paths, each as the same text however it was written."""
    if isinstance(value, list):
        return [spelled_out(item) for item in value]
    return os.path.abspath(os.path.expanduser(value)) if isinstance(value, str) else value


def identity(config: dict[str, Any]) -> dict[str, Any]:
    """The values of a DataConfig that decide the tokens."""
    return {
        key: value
        for key, value in config.items()
        if key not in FREE_KEYS and config["source"] in READ_BY.get(key, SOURCES)
    }


def _open_source(config: DataConfig) -> Source:
    if config.source == "pystdlib":
        return PythonFiles(standard_library())
    if config.source == "pypackages":
        return PythonFiles(installed_packages())
    if config.source == "text":
        return TextFiles(config.paths, config.text_field)
    return HuggingFace(config.dataset, config.dataset_name, config.text_field)


def _lock(partial: Path) -> TextIO:
    """Create the folder partial and lock it against other processes until the returned file is closed.

    The system closes it when this process ends, however it ends.
    """
    path = partial / LOCK
    while True:
        partial.mkdir(exist_ok=True)
        # the holder may rename or remove the folder, lock and all, at any time: then try again
        with suppress(FileNotFoundError):
            names = os.listdir(partial)
            if names and LOCK not in names:
                raise ValueError(
                    f"{partial} was not made by prepare: move it away, or choose another data.folder"
                )
            file = path.open("w", encoding="utf-8")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                log.info("another process prepares %s: waiting", partial)
                fcntl.flock(file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    return file
            file.close()


def _clear(partial: Path) -> None:
    for path in partial.iterdir():
        if path.name != LOCK:
            path.unlink()


def _remove(partial: Path) -> None:
    _clear(partial)
    (partial / LOCK).unlink()
    # another process may have put its lock there in the meantime
    with suppress(OSError):
        partial.rmdir()


def _write_corpus(partial: Path, config: DataConfig) -> None:
    started = time.monotonic()
    source = _open_source(config)
    # taken before the work, so that later changes are noticed
    source_fingerprint = source.fingerprint()
    tokenizer = load_tokenizer(config.tokenizer)
    plan = _plan(source, config)
    writers = {
        split: ShardWriter(
            partial,
            split,
            tokens_per_shard=config.shard_tokens,
            tokenizer=tokenizer.name,
            dtype=tokenizer.dtype,
        )
        for split in SPLITS
    }
    documents, left_out = _write_tokens(writers, source, plan, config)
    splits = {
        split: {
            "tokens": sum(shard["tokens"] for shard in writer.shards),
            "documents": documents[split],
            "shards": writer.shards,
        }
        for split, writer in writers.items()
    }
    if not all(split["tokens"] for split in splits.values()):
        raise ValueError(
            f"data.validation_fraction={config.validation_fraction} left a split empty, documents: "
            f"{dict(documents)}: choose a larger fraction or more documents"
        )
    manifest = {
        "config": identity(asdict(config)),
        "source_fingerprint": source_fingerprint,
        "tokenizer": config.tokenizer,
        "vocab_size": tokenizer.vocab_size,
        "end_of_text": tokenizer.end_of_text,
        "left_out": left_out,
        "splits": splits,
    }
    with _writing(config):
        write_manifest(partial, manifest)
    n_train, n_val = (splits[split]["tokens"] for split in SPLITS)
    log.info(
        "prepared %s in %.1f seconds: %s tokens for training, %s for validation (%.1f%%), left out %s",
        config.folder,
        time.monotonic() - started,
        f"{n_train:,}",
        f"{n_val:,}",
        100 * n_val / (n_train + n_val),
        left_out or "nothing",
    )


def _write_tokens(
    writers: dict[str, ShardWriter], source: Source, plan: Plan, config: DataConfig
) -> tuple[Counter[str], dict[str, int]]:
    """Writes the tokens of both splits; gives the documents of each, and what was left out by reason."""
    counts: Counter[str] = Counter()
    documents: Counter[str] = Counter(dict.fromkeys(SPLITS, 0))
    stream = (
        ("val" if plan.is_validation(group) else "train", text)
        for group, text in unique_documents(source, config.max_documents, counts)
    )
    workers = config.workers or len(os.sched_getaffinity(0))
    log.info("preparing %s from source %s, data.workers=%d", config.folder, config.source, workers)
    with tqdm(total=plan.characters, unit="char", unit_scale=True, desc="tokenizing", disable=None) as bar:
        for chunk, tokens in encode_in_order(stream, config.tokenizer, workers):
            with _writing(config):
                writers[chunk.split].append(tokens)
            documents[chunk.split] += len(chunk.texts)
            bar.update(chunk.characters)
    with _writing(config):
        for writer in writers.values():
            writer.close()
    return documents, dict(sorted(counts.items()))


@contextmanager
def _writing(config: DataConfig) -> Iterator[None]:
    """Names the folder in an OSError from the body: those of the disk, such as a full one, do not name it."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"data.folder={config.folder!r} was not written ({error}): make room there, or name a folder on "
            "another disk"
        ) from error


def _plan(source: Source, config: DataConfig) -> Plan:
    counts: Counter[str] = Counter()
    documents = unique_documents(source, config.max_documents, counts)
    first = next(documents, None)
    if first is None:
        place = (
            f"data.paths={list(config.paths)}"
            if config.paths
            else f"data.source={config.source} {config.dataset}"
        )
        raise ValueError(
            f"{place} holds no text, left out: {dict(counts) or 'nothing'}; name files with text in UTF-8"
        )
    try:
        return plan_validation(chain([first], documents), config.validation_fraction, config.seed)
    except ValueError as error:
        raise ValueError(f"{error}; left out: {dict(counts) or 'nothing'}") from error
