"""Batches of training text: the tokens that a rank sees at a step depend on seed and step alone."""

from bisect import bisect_right
from itertools import accumulate
from operator import index
from pathlib import Path

import numpy as np
import torch

from data.manifest import SPLITS, read_manifest
from data.shards import read_shard
from data.tokenizer import shard_mark


class TokenLoader:
    """Sequences of one split of a prepared folder, in a new random order in each epoch.

    The shards of the split count as one long text. Sequence i is its tokens i * seq_len .. (i + 1) * seq_len
    - 1, with the following token as the last target: sequences do not overlap, and may cross documents and
    shards. Epochs follow each other without end, each a permutation of the sequences drawn from (seed,
    epoch). Step s takes sequences s * sequences_per_step .. (s + 1) * sequences_per_step - 1 of that stream,
    and rank r the r-th of world_size equal parts of them. So any number of ranks and any micro-batch size
    consume the same tokens at the same step, an epoch holds each sequence once, and a resumed run, with the
    same numpy, needs no saved state.

    folder: what prepare returned. split: "train" or "val". tokenizer: what the shards must be made with.
    shuffle=False keeps the order of the text, for validation; a step may then be longer than the split,
    which starts over at its end. sequences_per_epoch and tokens_per_epoch count the whole split, all ranks
    together.
    Raises ValueError for a folder or shard that does not fit, for too little text, and if the ranks do not
    divide sequences_per_step.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        split: str,
        seq_len: int,
        sequences_per_step: int,
        seed: int,
        tokenizer: str,
        rank: int = 0,
        world_size: int = 1,
        shuffle: bool = True,
    ) -> None:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
        # NumPy's integers have 8 to 64 bits, and a product of theirs no more
        seq_len, sequences_per_step = index(seq_len), index(sequences_per_step)
        rank, world_size = index(rank), index(world_size)
        if seq_len < 1 or sequences_per_step < 1:
            raise ValueError(
                f"seq_len and sequences_per_step must be at least 1, got {seq_len} and {sequences_per_step}"
            )
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be in 0 .. world_size - 1, got {rank} with world_size {world_size}")
        if sequences_per_step % world_size:
            nearest = max(1, round(sequences_per_step / world_size)) * world_size
            raise ValueError(
                f"sequences_per_step must be a multiple of the {world_size} ranks, got {sequences_per_step}: "
                f"change tokens_per_step, {nearest * seq_len} is nearest"
            )
        shards = read_manifest(Path(folder))["splits"][split]["shards"]
        mark = shard_mark(tokenizer)
        self._shards = [read_shard(Path(folder, shard["file"]), tokenizer=mark) for shard in shards]
        # where each shard ends in the long text
        self._ends = list(accumulate(len(shard) for shard in self._shards))
        self.seq_len = seq_len
        self.sequences_per_step = sequences_per_step
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self.shuffle = shuffle
        # the last sequence needs one token more for its last target
        self.sequences_per_epoch = max(0, self._ends[-1] - 1) // seq_len
        self.tokens_per_epoch = self.sequences_per_epoch * seq_len
        if shuffle and self.sequences_per_epoch < sequences_per_step:
            raise ValueError(
                f"split {split!r} in {str(folder)!r} has {self._ends[-1]} tokens, too few for one step of "
                f"{sequences_per_step} sequences of seq_len {seq_len}: lower seq_len or tokens_per_step, or "
                "prepare more text"
            )
        if self.sequences_per_epoch == 0:
            raise ValueError(
                f"split {split!r} in {str(folder)!r} has {self._ends[-1]} tokens, too few for one sequence "
                f"of seq_len {seq_len}: lower seq_len, or prepare a larger data.validation_fraction"
            )
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def __len__(self) -> int:
        """Sequences in an epoch."""
        return self.sequences_per_epoch

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's (tokens, targets) of step, counted from 0.

        Both (sequences_per_step // world_size, seq_len) int64 on the CPU; targets are shifted by one token.
        """
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        step = index(step)
        rows = self.sequences_per_step // self.world_size
        first = step * self.sequences_per_step + self.rank * rows
        windows = np.empty((rows, self.seq_len + 1), dtype=self._shards[0].dtype)
        for row in range(rows):
            self._read(self._sequence(first + row) * self.seq_len, windows[row])
        tokens = torch.from_numpy(windows[:, :-1].astype(np.int64))  # (rows, seq_len)
        targets = torch.from_numpy(windows[:, 1:].astype(np.int64))  # (rows, seq_len)
        return tokens, targets

    def _sequence(self, sample: int) -> int:
        """The index in the text of sequence number `sample` in the endless stream of epochs."""
        epoch, place = divmod(sample, self.sequences_per_epoch)
        if not self.shuffle:
            return place
        if epoch != self._epoch:
            order = np.arange(self.sequences_per_epoch, dtype=np.uint32)
            np.random.default_rng([self.seed, epoch]).shuffle(order)
            self._epoch, self._order = epoch, order
        return int(self._order[place])

    def _read(self, start: int, out: np.ndarray) -> None:
        """Fill out with the tokens of the long text from start on, across as many shards as it takes."""
        shard = bisect_right(self._ends, start)
        filled = 0
        while filled < len(out):
            offset = start + filled - (self._ends[shard] - len(self._shards[shard]))
            piece = self._shards[shard][offset : offset + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1
