"""Encode a stream of documents on many cores, in order, with bounded memory.

Documents of one split are bundled into chunks of about CHUNK_CHARACTERS, dealt to worker processes in turn
through a pipe each. No worker holds more than CHUNKS_PER_WORKER: memory grows with workers alone.
The standard library's pools wait forever if a worker is killed while it holds a lock; a pipe just closes.
"""

import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import NamedTuple

import numpy as np

from data.child import start_child
from data.tokenizer import encode_documents, load_tokenizer

CHUNK_CHARACTERS = 1 << 19
# one in progress, one waiting
CHUNKS_PER_WORKER = 2


class Chunk(NamedTuple):
    """Some documents of one split."""

    split: str
    texts: list[str]
    characters: int


def encode_in_order(
    documents: Iterable[tuple[str, str]], tokenizer: str, workers: int
) -> Iterator[tuple[Chunk, np.ndarray]]:
    """Chunks of documents, (split, text), with their tokens, (n,); end of text follows each document.

    The order of documents within a split is kept: the result does not depend on workers, a count of
    processes; 1 encodes in this process. Raises ChildProcessError, an OSError, if a worker is killed.
    """
    chunks, encoder = _chunks(documents), load_tokenizer(tokenizer)
    if workers == 1:
        yield from ((chunk, encode_documents(encoder, chunk.texts)) for chunk in chunks)
        return
    crew: list[_Worker] = []
    under_way: deque[tuple[Chunk, _Worker]] = deque()
    try:
        # all start at the same time: what is sent to one waits until it has begun to read
        first = list(islice(chunks, workers))
        crew.extend(_Worker(tokenizer, encoder.dtype) for _ in first)
        for number, chunk in enumerate(chain(first, chunks)):
            if len(under_way) == CHUNKS_PER_WORKER * workers:
                # the oldest is with the worker whose turn it is
                done, worker = under_way.popleft()
                yield done, worker.receive()
            worker = crew[number % workers]
            worker.send(chunk)
            under_way.append((chunk, worker))
        while under_way:
            done, worker = under_way.popleft()
            yield done, worker.receive()
    finally:
        for worker in crew:
            worker.end()


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


class _Worker:
    """A process that encodes what it is sent, in order."""

    def __init__(self, tokenizer: str, dtype: np.dtype) -> None:
        self._dtype = dtype
        # the parent answers Ctrl-C for all
        self._process, self._pipe = start_child(_work, tokenizer, daemon=True)

    def send(self, chunk: Chunk) -> None:
        try:
            self._pipe.send(chunk.texts)
        except OSError as error:
            raise self._ended() from error

    def receive(self) -> np.ndarray:
        try:
            return np.frombuffer(self._pipe.recv_bytes(), dtype=self._dtype)
        except (EOFError, OSError) as error:
            raise self._ended() from error

    def end(self) -> None:
        self._pipe.close()
        self._process.join()

    def _ended(self) -> ChildProcessError:
        self._process.join()
        return ChildProcessError(
            f"a tokenizing process ended with code {self._process.exitcode}; -9 most likely means too "
            "little memory: lower data.workers"
        )


def _work(pipe: Connection, tokenizer: str) -> None:
    chunks: SimpleQueue[list[str]] = SimpleQueue()
    # reads while this thread writes, so that both sides never wait for each other
    threading.Thread(target=_read, args=(pipe, chunks), daemon=True).start()
    encoder = load_tokenizer(tokenizer)
    # the thread above ends the process; this one may notice first that the parent is gone
    with suppress(OSError):
        while True:
            pipe.send_bytes(encode_documents(encoder, chunks.get()).data)


def _read(pipe: Connection, chunks: SimpleQueue) -> None:
    try:
        while True:
            chunks.put(pipe.recv())
    # the parent is done, or gone
    except (EOFError, OSError):
        os._exit(0)
