"""Encode a stream of documents on many cores, in order, with bounded memory.

Documents of one split are bundled to chunks of about CHUNK_CHARACTERS; worker processes encode chunks; no
more than CHUNKS_PER_WORKER chunks a worker are under way, so that memory depends on the number of workers
alone.
"""

import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

import numpy as np

from data.tokenizer import Tokenizer, encode_documents, load_tokenizer

CHUNK_CHARACTERS = 1 << 19
CHUNKS_PER_WORKER = 3


class Chunk(NamedTuple):
    """Some documents of one split."""

    split: str
    texts: list[str]
    characters: int


def encode_in_order(
    documents: Iterable[tuple[str, str]], tokenizer: str, workers: int
) -> Iterator[tuple[Chunk, np.ndarray]]:
    """Chunks of documents, (split, text), with their tokens, uint16 (n,); end of text follows each document.

    The order of documents within a split is kept: the result does not depend on workers, a count of
    processes; 1 encodes in this process. Raises RuntimeError if a worker is killed.
    """
    chunks = _chunks(documents)
    if workers == 1:
        encoder = load_tokenizer(tokenizer)
        yield from ((chunk, encode_documents(encoder, chunk.texts)) for chunk in chunks)
        return
    # spawn: the parent may hold threads and a CUDA context, which do not survive a fork
    context = multiprocessing.get_context("spawn")
    under_way: deque[tuple[Chunk, Future[np.ndarray]]] = deque()
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(tokenizer,))
    try:
        for chunk in chunks:
            under_way.append((chunk, pool.submit(_encode, chunk.texts)))
            if len(under_way) >= CHUNKS_PER_WORKER * workers:
                chunk, future = under_way.popleft()
                yield chunk, future.result()
        while under_way:
            chunk, future = under_way.popleft()
            yield chunk, future.result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"one of {workers} tokenizing processes was killed, likely for want of memory: lower data.workers"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _chunks(documents: Iterable[tuple[str, str]]) -> Iterator[Chunk]:
    texts: dict[str, list[str]] = {}
    characters: dict[str, int] = {}
    for split, text in documents:
        texts.setdefault(split, []).append(text)
        characters[split] = characters.get(split, 0) + len(text)
        if characters[split] >= CHUNK_CHARACTERS:
            yield Chunk(split, texts.pop(split), characters.pop(split))
    for split, rest in texts.items():
        yield Chunk(split, rest, characters[split])


_worker_tokenizer: Tokenizer


def _start_worker(tokenizer: str) -> None:
    global _worker_tokenizer
    # the parent answers control-C for all
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker_tokenizer = load_tokenizer(tokenizer)


def _end_with_parent() -> None:
    # a worker holds both ends of its queue: without this it would wait for ever for a parent that was killed
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _encode(texts: list[str]) -> np.ndarray:
    return encode_documents(_worker_tokenizer, texts)
