"""Random small problems for the Hopper kernels, to be run under NVIDIA's compute-sanitizer.

    compute-sanitizer --tool memcheck python -m tests.sanitize_hopper
    compute-sanitizer --tool synccheck python -m tests.sanitize_hopper problems=8 longest=200
    compute-sanitizer --tool racecheck python -m tests.sanitize_hopper problems=8 longest=200

Racecheck reports three pairs that are no race, because it does not know the barriers that order them: the
loop in which Triton's idle warps wait for their role with the code that assigns it; primitives.announce,
which writes a tile's number, with primitives.announced, which reads it; and the store and load of P in
backward_256.py. A report of any other pair is a bug. See docs/hopper.md.
"""

import random
import sys
from unittest.mock import patch

import torch
from torch import Tensor

from kernels import block_masks
from kernels.flash_attention import flash_attention, flash_attention_varlen
from kernels.operators import use_implementation


def run_random_problem(generator: random.Random, longest: int) -> tuple[dict, list[Tensor]]:
    """The shape, dtype and mask, and out, dq, dk and dv, of one problem of up to `longest` tokens."""
    mask = generator.choice(["full", "causal", "window", "documents", "blocks", "varlen"])
    batch, n_kv_head, group = (generator.randint(1, 3) for _ in range(3))
    if generator.random() < 0.3:
        # more tiles than a card has multiprocessors, so that a block takes several
        batch, n_kv_head = 12, 12
    head_dim = generator.choice([64, 64, 128, 128, 256, 40, 96, 192])
    seq_q, seq_k = (generator.randint(1, longest) for _ in range(2))
    options = {"causal": mask not in ("full", "blocks"), "deterministic": generator.random() < 0.5}
    if mask == "window":
        options["window"] = generator.randint(1, longest)
    if mask == "documents":
        # documents of about ten tokens; queries and keys are the same tokens
        seq_k = seq_q
        options["document_ids"] = (torch.rand(batch, seq_k, device="cuda") < 0.1).cumsum(1).int()
    if mask == "varlen":
        # some sequences without queries or keys, some of whole tiles
        batch, options["causal"] = 1, generator.random() < 0.5
        starts_q, starts_k = (
            torch.tensor([0, 64, *generator.choices((0, 1, 64, 100, 128), k=5)], device="cuda")
            .cumsum(0)
            .int()
            for _ in range(2)
        )
        seq_q, seq_k = int(starts_q[-1]), int(starts_k[-1])
    if mask == "blocks":
        # absent, partial and full blocks
        shares = torch.tensor([0.0, 0.3, 1.0], device="cuda")[
            torch.randint(3, ((seq_q + 127) // 128, (seq_k + 127) // 128))
        ]
        shares = shares.repeat_interleave(128, 0)[:seq_q].repeat_interleave(128, 1)[:, :seq_k]
        options["block_mask"] = block_masks.from_dense(torch.rand_like(shares) < shares)
        # the block mask alone, or cut by a causal mask
        options["causal"] = generator.random() < 0.5
    if generator.random() < 0.3:
        options |= {"dropout_p": 0.1, "dropout_seed": generator.randrange(2**62)}
    dtype = generator.choice([torch.bfloat16, torch.float16])

    def draw(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, head_dim, device="cuda", dtype=dtype)

    packs = generator.random() < 0.5
    if packs and seq_q == seq_k and group == 1:
        q, k, v = draw(seq_q, 3, n_kv_head).unbind(2)
    elif packs:
        q, (k, v) = draw(seq_q, n_kv_head * group), draw(seq_k, 2, n_kv_head).unbind(2)
    else:
        q, k, v = draw(seq_q, n_kv_head * group), draw(seq_k, n_kv_head), draw(seq_k, n_kv_head)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    # otherwise the kernels that sum dq would get no short rows
    summed = patch("kernels.hopper.launch.sum_pays", lambda *_: True)
    # covers the backward pass too: an operator chooses its implementation anew in each pass
    with use_implementation("hopper"), summed:
        if mask == "varlen":
            out = flash_attention_varlen(
                *(x[0] for x in (q, k, v)), starts_q, cu_seqlens_k=starts_k, **options
            )
        else:
            out = flash_attention(q, k, v, **options)
        gradients = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    name = {"mask": mask, "deterministic": options["deterministic"], "dtype": dtype, "packs": packs}
    name["dropout_p"] = options.get("dropout_p", 0.0)
    return name | {"q": tuple(q.shape), "k": tuple(k.shape)}, [out, *gradients]


def main(arguments: list[str]) -> None:
    chosen = {"problems": "40", "longest": "400"} | dict(a.split("=") for a in arguments)
    generator = random.Random(0)
    torch.manual_seed(0)
    for _ in range(int(chosen["problems"])):
        run_random_problem(generator, int(chosen["longest"]))
    torch.cuda.synchronize()
    print(f"{chosen['problems']} problems of up to {chosen['longest']} tokens ran")


if __name__ == "__main__":
    main(sys.argv[1:])
