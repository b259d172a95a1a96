"""The block-sparse masks of the paper's experiments; the paper gives neither block size nor density."""

import torch

from kernels.block_constructors import from_blocks
from kernels.block_mask import BlockMask

BLOCK_SIZE = 128


def two_blocks(seq_len: int, device) -> BlockMask:
    """256 keys for each query, its own block and a far one: the rule behind Tables 9 to 20 from T 2048 on."""
    n = -(-seq_len // BLOCK_SIZE)
    row = torch.arange(n, device=device)
    # half the sequence away, so that two blocks of queries see each block of keys
    far = (row + n // 2) % n
    rows, columns = torch.cat([row, row]), torch.cat([row, far])
    if n < 2:
        rows, columns = row, row
    return from_blocks(rows, columns, seq_len, block_size=BLOCK_SIZE)


def random_blocks(seq_len: int, density: float, device) -> BlockMask:
    """The share `density` of all blocks, equally many in each row, always including the diagonal block."""
    n = -(-seq_len // BLOCK_SIZE)
    kept = max(1, round(density * n))
    generator = torch.Generator().manual_seed(0)
    rank = torch.rand(n, n, generator=generator)
    rank.fill_diagonal_(-1.0)
    column = rank.argsort(dim=1)[:, :kept].to(device)
    row = torch.arange(n, device=device)[:, None].expand_as(column)
    return from_blocks(row.flatten(), column.flatten(), seq_len, block_size=BLOCK_SIZE)
