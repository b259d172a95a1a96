"""Measures candidate tiles of the portable kernels on this GPU, one kernel at a time, best first.

    python -m scripts.tune_tiles kernels=[dkdv] head_dims=[64] out=tiles.json
    python -m scripts.tune_tiles kernels=[dkdv] 'candidates=[[64,64,4,2],[64,64,8,2]]'

Candidates are compiled in parallel and measured in turns: if each were finished before the next began, the
clock of a warming GPU would decide between tiles that are 2% apart. A row gives the TFLOP/s of one kernel
alone at each length, medians over the rounds, counting the matrix products that it does: forward 2, dq 3,
dkdv 4. Edit kernels/tiles.py by hand from these rows, once benchmark_attention has measured the choice beside
other implementations too.
"""

import math
import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch
import triton

from kernels import block_masks
from kernels.block_mask import BlockMask
from kernels.checks import HEAD_DIMS, check_dropout, takes_head_dim
from kernels.portable import backward, forward
from kernels.problem import Problem
from kernels.tiles import ALL_REGISTERS, Tile, choose_tile
from scripts.arguments import OVERWRITE, argument, check_least, check_some, result_file, run_script
from scripts.benchmark_attention import visible_share
from train.results import write_result

PRODUCTS = {"forward": 2, "dq": 3, "dkdv": 4}
BLOCKS = [(64, 32), (64, 64), (128, 32), (128, 64), (64, 128), (128, 128)]
WARPS, STAGES = (4, 8), (2, 3)
# values of make_tile's `form`
FORMS = (0, 1)
ROUNDS = 5


@dataclass(kw_only=True, slots=True)
class Arguments:
    kernels: list[str] = argument(["forward", "dq", "dkdv"], "of forward dq dkdv")
    head_dims: list[int] = argument([64, 128], "D")
    seq_lens: list[int] = argument([1024, 4096, 16384], "T")
    causal: list[bool] = argument([True, False], "masks: causal, full or both")
    candidates: list[list[int]] | None = argument(
        None, "lists of BLOCK_M, BLOCK_N, warps, stages, most registers or 0, 1 if held or keys_first"
    )
    tma: list[bool] = argument([True], "reading by TMA, by pointers or both")
    window: int | None = argument(None, "keys that a query sees")
    pattern: str | None = argument(None, "a block mask, such as window(1024), in place of a causal one")
    block_size: int = argument(128, "of the block mask")
    dropout_p: float = argument(0.0, "dropout")
    tokens: int = argument(16384, "B * T")
    width: int = argument(2048, "H * D")
    best: int = argument(5, "rows to print for each kernel, head_dim and mask")
    out: str = result_file("tiles.json", "result file")
    overwrite: bool = argument(False, OVERWRITE)


def main(arguments: Arguments) -> None:
    check(arguments)
    if not torch.cuda.is_available():
        raise ValueError("tune_tiles needs a CUDA GPU; none was found")
    tiles = choose_candidates(arguments)
    cases = list(product(arguments.kernels, arguments.head_dims, arguments.causal))
    jobs = [(arguments, *case, tile) for case in cases for tile in tiles]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        able = {job[1:]: ran for job, ran in zip(jobs, pool.map(compiles, jobs), strict=True)}
    rows = []
    for kernel, head_dim, causal in cases:
        chosen = [tile for tile in tiles if able[kernel, head_dim, causal, tile]]
        measured = measure(arguments, kernel, head_dim, causal, chosen)
        rows += measured
        print(f"{kernel} head_dim {head_dim} {'causal' if causal else 'full'}")
        for row in sorted(measured, key=lambda row: -math.prod(row["tflops"]))[: arguments.best]:
            print("   ", Tile(*row["tile"]), [round(speed) for speed in row["tflops"]])
        write_result(Path(arguments.out), rows)


def check(arguments: Arguments) -> None:
    """Raises ValueError for what would fail halfway, or measure nothing."""
    check_some(arguments, "kernels", "head_dims", "seq_lens", "causal", "tma")
    unknown = [name for name in arguments.kernels if name not in PRODUCTS]
    if unknown:
        raise ValueError(f"kernels must be of {', '.join(PRODUCTS)}, got {', '.join(unknown)}")
    if arguments.candidates is not None:
        check_some(arguments, "candidates")
    check_least(arguments, "window", "best")
    check_dropout(arguments.dropout_p)
    for shape in arguments.candidates or []:
        if not 4 <= len(shape) <= 6:
            raise ValueError(
                f"candidates must be lists of 4 to 6 numbers, got {shape}: as [64, 64, 4, 2], see --help"
            )
        if not is_tile(*shape):
            raise ValueError(
                "candidates must have blocks of 16 or more and up to 32 warps, all powers of two, a stage or "
                f"more, registers up to {ALL_REGISTERS} and a form of 0 or 1, got {shape}: change it"
            )
    for key, total in (("seq_lens", "tokens"), ("head_dims", "width")):
        for part in getattr(arguments, key):
            if part < 1 or getattr(arguments, total) < 1 or getattr(arguments, total) % part:
                raise ValueError(
                    f"{key} must divide {total}={getattr(arguments, total)}, got {part}: change {total} too"
                )
    for head_dim in arguments.head_dims:
        if not takes_head_dim(head_dim):
            raise ValueError(f"head_dims must be {HEAD_DIMS}, got {head_dim}: change it")
    for key in ("window", "pattern"):
        given = getattr(arguments, key)
        if given is not None and False in arguments.causal:
            raise ValueError(f"{key}={given} is not measured with a full mask: use causal=[true]")
    if arguments.pattern is not None:
        if arguments.window is not None:
            raise ValueError(
                f"window={arguments.window} and pattern={arguments.pattern} both say which keys a query "
                "sees: leave one out"
            )
        for seq_len in arguments.seq_lens:
            block_masks.parse(arguments.pattern, seq_len, block_size=arguments.block_size)


def is_tile(block_m, block_n, num_warps, num_stages, registers=0, form=0) -> bool:
    """Whether a kernel of such a tile can be compiled, whatever it needs of the GPU."""
    return (
        min(block_m, block_n) >= 16
        and 1 <= num_warps <= 32
        and all(number.bit_count() == 1 for number in (block_m, block_n, num_warps))
        and num_stages >= 1
        and 0 <= registers <= ALL_REGISTERS
        and form in FORMS
    )


def choose_candidates(arguments: Arguments) -> list[Tile]:
    grid = [
        (*blocks, warps, stages, 0, form)
        for blocks, warps, stages, form in product(BLOCKS, WARPS, STAGES, FORMS)
    ]
    shapes = arguments.candidates or grid
    tiles = (make_tile(*shape, tma=tma) for shape, tma in product(shapes, arguments.tma))
    # with tiles larger than a mask's blocks a kernel skips blocks, and would look fast; each tile once
    block_size = 0 if arguments.pattern is None else arguments.block_size
    return list(dict.fromkeys(tile.within(block_size) for tile in tiles))


def make_tile(block_m, block_n, num_warps, num_stages, registers=0, form=0, *, tma: bool) -> Tile:
    """form: sets `held` for forward and dq, `keys_first` for dkdv; each kernel reads only one of them."""
    return Tile(block_m, block_n, num_warps, num_stages, tma, registers or None, bool(form), bool(form))


def compiles(job: tuple) -> bool:
    """Whether a candidate runs; leaves it compiled in Triton's cache."""
    arguments, kernel, head_dim, causal, tile = job
    try:
        launcher(arguments, kernel, head_dim, causal, tile, min(arguments.seq_lens))()
        torch.cuda.synchronize()
    except triton.runtime.errors.OutOfResources:
        return False
    return True


def measure(arguments: Arguments, kernel: str, head_dim: int, causal: bool, tiles: list[Tile]) -> list[dict]:
    """A row for each candidate: its median speed at each length, in turns with the others."""
    speeds = {tile: [] for tile in tiles}
    for seq_len in arguments.seq_lens:
        share = visible_share(seq_len, arguments.window) if causal else 1.0
        if arguments.pattern is not None:
            mask = block_mask(arguments.pattern, seq_len, arguments.block_size)
            share = len(mask.keys) * mask.block_size**2 / seq_len**2
        flop = PRODUCTS[kernel] * 2 * arguments.tokens * seq_len * share * arguments.width
        for tile, milliseconds in in_turns(arguments, kernel, head_dim, causal, tiles, seq_len).items():
            speeds[tile].append(flop / milliseconds / 1e9)
    shared = {
        "kernel": kernel,
        "head_dim": head_dim,
        "causal": causal,
        "window": arguments.window if causal else None,
        "pattern": arguments.pattern,
        "block_size": arguments.block_size if arguments.pattern else None,
        "dropout_p": arguments.dropout_p,
        "seq_lens": arguments.seq_lens,
    }
    return [{**shared, "tile": list(tile), "tflops": tflops} for tile, tflops in speeds.items()]


def in_turns(
    arguments: Arguments, kernel: str, head_dim: int, causal: bool, tiles: list[Tile], seq_len: int
) -> dict[Tile, float]:
    """Milliseconds of each candidate, the median of rounds in which each has one turn."""
    times = {tile: [] for tile in tiles}
    for number in range(ROUNDS):
        # forwards and backwards in turn, so that no tile always follows the same one
        for tile in tiles if number % 2 == 0 else reversed(tiles):
            run = launcher(arguments, kernel, head_dim, causal, tile, seq_len)
            times[tile].append(triton.testing.do_bench(run, warmup=2, rep=5, return_mode="median"))
    return {tile: median(ms) for tile, ms in times.items()}


def launcher(
    arguments: Arguments, kernel: str, head_dim: int, causal: bool, tile: Tile, seq_len: int
) -> Callable:
    """A function that launches one kernel with one tile, and no other."""
    torch.manual_seed(0)
    shape = (arguments.tokens // seq_len, seq_len, arguments.width // head_dim, head_dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    mask = arguments.pattern and block_mask(arguments.pattern, seq_len, arguments.block_size)
    problem = Problem(
        softmax_scale=head_dim**-0.5,
        causal=causal and mask is None,
        window=arguments.window if causal else None,
        dropout_p=arguments.dropout_p,
        dropout_seed=torch.tensor([1], device="cuda") if arguments.dropout_p else None,
        blocks=() if mask is None else tuple(mask.tensors()),
    )

    forward.choose_tile = lambda *shape: tile if kernel == "forward" else choose_tile(*shape)
    if kernel == "forward":
        return lambda: forward.attention_forward(problem, q, k, v)
    out, lse = forward.attention_forward(problem, q, k, v)
    delta, lse_log2 = backward.preprocess(out, dout, lse, None, backward.padded_length(q))
    inputs = backward.gather_inputs(problem, q, k, v, dout, lse_log2, delta)
    dq, dk, dv = map(torch.empty_like, (q, k, v))
    if kernel == "dq":
        return lambda: backward.compute_dq(problem, inputs, tile, dq)
    return lambda: backward.compute_dkdv(problem, inputs, tile, dk, dv)


@cache
def block_mask(pattern: str, seq_len: int, block_size: int) -> BlockMask:
    return block_masks.parse(pattern, seq_len, block_size=block_size, device="cuda")


if __name__ == "__main__":
    run_script(main, Arguments, __doc__)
