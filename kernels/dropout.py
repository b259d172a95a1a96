"""The dropout mask of the kernels, bit for bit, as a PyTorch function.

Whether probability (batch b, head h, row i, column j) is kept depends on these four numbers and the seed
alone: not on tile shapes, GPU, or pass. One Philox4x32 call, keyed by the seed, serves 16 probabilities, in
two rows and eight columns, which the matrix units leave in the registers of one thread, so that no word has
to travel:

    words = philox(seed, counter=(j // 32 * 4 + j % 8 // 2, i // 16 * 8 + i % 8, h, b))   # four of 32 bits
    kept  = rotate_right(words[j // 8 % 4], 16 * (i // 8 % 2) + 8 * (j % 2)) < (1 - p) * 2**32

Four probabilities read one word, each from its own byte on, so every bit of a call is in the leading byte of
some decision. Each is kept with the exact rate; two that share a word are correlated by less than 0.4%,
because their decisions meet only where the leading byte falls on the threshold, once in 256.

Source: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011); 7 rounds pass BigCrush.
"""

import torch
from torch import Tensor

PHILOX_ROUNDS = 7

ROUND_A, ROUND_B = 0xD2511F53, 0xCD9E8D57
KEY_A, KEY_B = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF


def keep_threshold(dropout_p: float) -> int:
    """The number below which a 32-bit word means "keep", itself such a word."""
    return min(round((1.0 - dropout_p) * 2**32), WORD)


def philox(seed: int, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, ...]:
    """Four words of 32 random bits for each counter (c0, c1, c2, c3); int64 tensors that broadcast."""
    c0, c1, c2, c3 = torch.broadcast_tensors(c0, c1, c2, c3)
    k0, k1 = seed & WORD, seed >> 32 & WORD
    for _ in range(PHILOX_ROUNDS):
        product_a, product_b = multiply_words(c0, ROUND_A), multiply_words(c2, ROUND_B)
        c0 = product_b[0] ^ c1 ^ k0
        c2 = product_a[0] ^ c3 ^ k1
        c1, c3 = product_b[1], product_a[1]
        k0, k1 = (k0 + KEY_A) & WORD, (k1 + KEY_B) & WORD
    return c0, c1, c2, c3


def multiply_words(x: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of x * factor, for x of 32 bits."""
    # in two halves: the whole product needs 64 bits without a sign
    low, high = (x & 0xFFFF) * factor, (x >> 16) * factor
    carry = low + ((high & 0xFFFF) << 16)
    return ((high >> 16) + (carry >> 32)) & WORD, carry & WORD


def dropout_keep_mask(
    seed: int | Tensor, dropout_p: float, batch: int, n_head: int, seq_q: int, seq_k: int, device=None
) -> Tensor:
    """True where a probability is kept: (B, H, Tq, Tk) bool, for tests and the reference."""
    i = torch.arange(seq_q, device=device)[:, None]
    j = torch.arange(seq_k, device=device)[None, :]
    head = torch.arange(n_head, device=device).view(-1, 1, 1)
    of_batch = torch.arange(batch, device=device).view(-1, 1, 1, 1)
    words = philox(int(seed), j // 32 * 4 + j % 8 // 2, i // 16 * 8 + i % 8, head, of_batch)
    word = torch.stack(words).gather(0, (j // 8 % 4).expand(1, batch, n_head, seq_q, seq_k))[0]
    shift = 16 * (i // 8 % 2) + 8 * (j % 2)
    rotated = (word >> shift | word << (32 - shift)) & WORD
    return rotated < keep_threshold(dropout_p)
