"""What the inline assembly of kernels/hopper computes, for gluon_on_cpu.py."""

import re

import torch

from kernels.dropout import WORD, multiply_words
from tests.gluon_partitions import named_barrier
from tests.gluon_tensors import Tensor, as_tensor


def bits_of(x: torch.Tensor, dtype) -> torch.Tensor:
    return x.to(dtype).view(torch.int16)


def joined(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """int32 of two int16."""
    return torch.stack((low.to(torch.int16), high.to(torch.int16)), -1).view(torch.int32).squeeze(-1)


def apart(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.to(torch.int32).contiguous().unsqueeze(-1).view(torch.int16).unbind(-1)


def packed(low: torch.Tensor, high: torch.Tensor, dtype) -> torch.Tensor:
    return joined(bits_of(low, dtype), bits_of(high, dtype))


def numbers(x: torch.Tensor, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The two 16-bit numbers of an int32, as float32."""
    return tuple(half.view(dtype).float() for half in apart(x))


def assembly(asm, constraints, args, dtype, is_pure, pack):
    """What the inline assembly of kernels/hopper computes."""
    x, *rest = map(as_tensor, args)
    kind = torch.bfloat16 if "bf16" in asm else torch.float16
    if asm in ("mov.b32 $0, $1;", "mov.u32 $0, $1;"):
        return args[0] if isinstance(args[0], Tensor) else Tensor(args[0])
    if "bar.red.or" in asm:
        limit = float(asm.split("$2, ")[1].split(";")[0])
        return Tensor((~(x <= limit)).any().int().expand(x.shape))
    if asm.startswith("bar."):
        number, n_threads = (int(word.strip(",;")) for word in asm.split()[1:3])
        named_barrier(number, n_threads // 128, asm.startswith("bar.sync"))
        return Tensor(x)
    if asm.startswith(("fence.proxy", "cp.async.bulk.wait_group")):
        return Tensor(x)
    if asm.startswith("cvt.rn"):
        return Tensor(packed(x, rest[0], kind))
    if "max.NaN" in asm:
        return Tensor(packed(*(half.clamp(min=0) for half in numbers(x, kind)), kind))
    if asm == "mov.b32 {$0, $1}, $2;":
        return tuple(map(Tensor, apart(x)))
    if asm.startswith("shl.b32"):
        return tuple(map(Tensor, numbers(x, torch.bfloat16)))
    if asm.startswith("{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16"):
        return tuple(map(Tensor, numbers(x, torch.float16)))
    if asm.startswith("set.ltu"):
        halves = zip(numbers(x, kind), numbers(rest[0], kind), strict=True)
        return Tensor(joined(*(torch.where(a >= b, 0, -1) for a, b in halves)))
    if asm.startswith("prmt"):
        return Tensor(joined(*((half >> 8 & 0xFF) | (half << 8) for half in apart(x))))
    if asm.startswith("movmatrix"):
        n, _, m, _ = x.shape
        square = torch.stack(apart(x), -1).permute(0, 2, 1, 3, 4).reshape(n, m, 8, 8).mT
        return Tensor(joined(*square.reshape(n, m, 8, 4, 2).permute(0, 2, 1, 3, 4).unbind(-1)))
    if "mul.wide.u32" in asm:
        words = multiply_words(x.long() & WORD, rest[0].long() & WORD)
        return tuple(Tensor(word.to(torch.int32)) for word in words)
    if "outweighs" in asm:
        least = float(re.search(r"outweighs, x, ([\d.]+)", asm)[1])
        if "mma" not in asm:
            # one answer for the 16 rows of a warp
            outweighs = (rest[0] - 0.8 * x > least).reshape(-1, 64).any(-1, keepdim=True)
            return Tensor(outweighs.int().expand(-1, 64).reshape(x.shape))
        l_i, sums, some, *columns = rest
        outweighs = (sums - 0.8 * l_i > least).any(-1, keepdim=True) & (some != 0)
        rounded = sum(sum(numbers(pair, torch.bfloat16)) for pair in columns)
        more = rounded.sum(-1, keepdim=True) / 4 - sums
        if "0.00398" in asm:
            missing = more.sum(-1, keepdim=True).abs() > 0.00398 * sums.sum(-1, keepdim=True)
            outweighs &= ~missing
        return Tensor(torch.where(outweighs, x + more, x))
    if "fma.rn.relu" in asm:
        slope, start = numbers(rest[1], kind)
        kept = []
        for p, half in zip(numbers(x, kind), numbers(rest[0], kind), strict=True):
            line = (half * slope + start).to(kind).float().clamp(min=0)
            kept.append(torch.where(line.isnan(), p, torch.minimum(p, line)))
        return Tensor(packed(*kept, kind))
    if "fma.rn.f32 x, p, $2, x" in asm:
        kind = torch.bfloat16 if "cvt.rn.bf16x2" in asm else torch.float16
        dp, delta, p = rest[:2], rest[2:4], rest[4:]
        if p:
            keeps = [half != 0 for half in apart(x)]
        else:
            p = numbers(x, kind)
            keeps, p = [half >= 0 for half in p], [half.abs() for half in p]
        ds = (p[i] * delta[i] + torch.where(keeps[i], p[i] * dp[i], 0.0) for i in range(2))
        return Tensor(packed(*ds, kind))
    raise NotImplementedError(asm)
