"""Shards: memory-mapped files of token ids, a header of 256 bytes, then little-endian uint16 or uint32.

Header: magic, version, header bytes, token count, crc32 of the tokens, tokenizer name, bytes of a token,
zeros; version 1 had 0 for the bytes of a token, and meant 2. A shard is written under a temporary name,
flushed to the disk and renamed: a file with a shard's name is a whole shard. Each document is followed by the
tokenizer's end-of-text token; a document may go on in the next shard. Ids beyond the vocabulary cannot occur:
every shard names the tokenizer that wrote it, and its checksum tells whether it was changed since.
"""

import ctypes
import mmap
import os
import struct
import weakref
import zlib
from functools import cache
from pathlib import Path

import numpy as np

MAGIC = b"NANOFLSH"
VERSION = 2
HEADER_BYTES = 256
# magic, version, header bytes, token count, crc32, tokenizer, token bytes
HEADER = struct.Struct("<8sIIQI32sI")
# dtype by bytes of a token, which are 0 in shards of version 1
TOKENS = {0: np.dtype("<u2"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
# (void *) -1, which mmap returns in place of an address
FAILED_MAP = ctypes.c_void_p(-1).value


class ShardError(ValueError):
    """A shard that cannot be used: changed, cut short, of another version or tokenizer."""


def write_shard(path: Path, tokens: np.ndarray, *, tokenizer: str) -> None:
    """Write tokens, uint16 or uint32 (n,), as the shard at path; whole or not at all.

    For tokens that exist in one piece; prepare writes its shards piece by piece (ShardWriter).
    tokenizer: the name of the tokenizer that made them, at most 32 bytes. Raises ValueError for another
    dtype.
    """
    if tokens.dtype not in TOKENS.values() or tokens.ndim != 1:
        raise ValueError(
            f"tokens must be uint16 or uint32 (n,), got {tokens.dtype} {tokens.shape}: convert them first"
        )
    shard = _OpenShard(Path(path), tokenizer, tokens.dtype)
    shard.append(tokens)
    shard.commit()


def read_shard(path: Path, *, tokenizer: str, verify: bool = False) -> np.ndarray:
    """The tokens of the shard at path, a read-only memory map, uint16 or uint32 (n,).

    verify: also read every token and compare the checksum, about 1 GB a second.
    Raises ShardError, a ValueError, for a file that is no shard, of another version, cut short, longer than
    its header says, changed (with verify), or made with another tokenizer; FileNotFoundError if there is
    none.
    """
    path = Path(path)
    remedy = f"delete the folder {path.parent} and prepare it again"
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if header[: len(MAGIC)] != MAGIC or len(header) < HEADER.size:
        raise ShardError(
            f"{path} is no shard: it must begin with {MAGIC!r}, got {header[: len(MAGIC)]!r}; {remedy}"
        )
    _, version, header_bytes, count, checksum, name, token_bytes = HEADER.unpack(header)
    if version not in (1, VERSION) or token_bytes not in TOKENS:
        raise ShardError(
            f"{path} must have shard version 1 or {VERSION}, got {version} with tokens of {token_bytes} "
            f"bytes; {remedy}"
        )
    dtype = TOKENS[token_bytes]
    expected = header_bytes + count * dtype.itemsize
    if size != expected:
        fault = "cut short" if size < expected else "too long"
        raise ShardError(f"{path} is {fault}: {count} tokens need {expected} bytes, got {size}; {remedy}")
    name = name.rstrip(b"\0").decode(errors="replace")
    if name != tokenizer:
        raise ShardError(
            f"{path} was made with tokenizer {name!r}, this run asks for {tokenizer!r}: "
            "change data.tokenizer, or choose another data.folder"
        )
    if count == 0:
        # an empty file part cannot be mapped
        return np.empty(0, dtype=dtype)
    tokens = _memory_map(path, size)[header_bytes:].view(dtype)
    if verify and (actual := zlib.crc32(tokens)) != checksum:
        raise ShardError(
            f"{path} is corrupt: its tokens have crc32 {actual:08x}, the header {checksum:08x}; {remedy}"
        )
    return tokens


class ShardWriter:
    """Writes tokens to a series of shards in folder: {split}_00000.bin, {split}_00001.bin and so on.

    tokens_per_shard: each shard but the last holds exactly this many. Memory does not grow with them.
    """

    def __init__(
        self, folder: Path, split: str, *, tokens_per_shard: int, tokenizer: str, dtype: np.dtype
    ) -> None:
        self.folder = Path(folder)
        self.split = split
        self.tokens_per_shard = tokens_per_shard
        self.tokenizer = tokenizer
        self.dtype = dtype
        self.shards: list[dict[str, str | int]] = []  # {"file", "tokens"} of each finished shard
        self._shard: _OpenShard | None = None

    def append(self, tokens: np.ndarray) -> None:
        """Add tokens, (n,) of dtype, to the split."""
        while len(tokens):
            if self._shard is None:
                path = self.folder / f"{self.split}_{len(self.shards):05d}.bin"
                self._shard = _OpenShard(path, self.tokenizer, self.dtype)
            room = self.tokens_per_shard - self._shard.count
            self._shard.append(tokens[:room])
            tokens = tokens[room:]
            if self._shard.count == self.tokens_per_shard:
                self._commit()

    def close(self) -> None:
        """Finish the last shard."""
        if self._shard is not None:
            self._commit()

    def _commit(self) -> None:
        self._shard.commit()
        self.shards.append({"file": self._shard.path.name, "tokens": self._shard.count})
        self._shard = None


class _OpenShard:
    """One shard being written, under a temporary name until commit."""

    def __init__(self, path: Path, tokenizer: str, dtype: np.dtype) -> None:
        self.path = path
        self._dtype = dtype
        self.count = 0
        self._tokenizer = tokenizer.encode()
        assert len(self._tokenizer) <= 32, tokenizer
        self._checksum = 0
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
        self._file = self._temporary.open("wb")
        self._file.write(bytes(HEADER_BYTES))

    def append(self, tokens: np.ndarray) -> None:
        content = np.ascontiguousarray(tokens, dtype=self._dtype).data
        self._checksum = zlib.crc32(content, self._checksum)
        self._file.write(content)
        self.count += len(tokens)

    def commit(self) -> None:
        header = HEADER.pack(
            MAGIC, VERSION, HEADER_BYTES, self.count, self._checksum, self._tokenizer, self._dtype.itemsize
        )
        with self._file as file:
            file.seek(0)
            file.write(header)
            file.flush()
            os.fsync(file.fileno())
        self._temporary.rename(self.path)
        sync_folder(self.path.parent)


def sync_folder(folder: Path) -> None:
    """Bring the names in folder to the disk: only then does a rename survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _memory_map(path: Path, size: int) -> np.ndarray:
    """The bytes of a file, read-only (size,), without a descriptor.

    np.memmap and mmap.mmap keep one for each file, of which a process may have no more than 1,024 by default:
    fewer than a large corpus has shards.
    """
    system = _system()
    with path.open("rb") as file:
        address = system.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == FAILED_MAP:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
    memory = (ctypes.c_ubyte * size).from_address(address)
    # not unmapped at the end of the process, when a thread may still read it
    weakref.finalize(memory, system.munmap, address, size).atexit = False
    content = np.frombuffer(memory, dtype=np.uint8)
    content.flags.writeable = False
    return content


@cache
def _system() -> ctypes.CDLL:
    system = ctypes.CDLL(None, use_errno=True)
    system.mmap.restype = ctypes.c_void_p
    system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    system.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return system
