"""What the Hopper kernels are told about a problem, in both passes."""

from torch import Tensor

from kernels.dropout import limit_bits, line_bits
from kernels.hopper.dropout import signed
from kernels.problem import Problem, list_strides


def mask_kind(problem: Problem) -> str:
    """The kind of schedule.Mask that a kernel is compiled for."""
    return "blocks" if problem.blocks else problem.mask


def list_arguments(lists: tuple[Tensor | None, ...], nothing: Tensor) -> tuple[Tensor | int, ...]:
    """The arguments of block_lists.BlockLists; `nothing` stands in for tensors that are not read."""
    if lists[0] is None:
        return nothing, nothing, nothing, 0, 0
    return *lists, *list_strides(lists)


def dropout_arguments(problem: Problem, nothing: Tensor) -> tuple[Tensor, int, int, float]:
    """The arguments of dropout.make_dropout; `nothing` stands in for a seed that is not read."""
    if problem.dropout_p == 0.0:
        return nothing, 0, 0, 1.0
    limit = limit_bits(problem.dropout_p)
    slope, start = line_bits(problem.dropout_p)
    return (
        problem.dropout_seed, signed(limit << 16 | limit), signed(start << 16 | slope), problem.keep_scale
    )  # fmt: skip


def gradient_scale(problem: Problem) -> float:
    """What sums over kept scores are multiplied by to give dq and dk, see dropout.gradient."""
    return problem.softmax_scale * problem.keep_scale


def keys_per_query(problem: Problem, seq_q: int, seq_k: int) -> float:
    """Average keys per query, as far as the host knows: bounds it has not read count as a causal mask."""
    if problem.blocks:
        spans, entries, _ = problem.row_lists
        listed = len(entries) / spans.shape[:3].numel() * problem.block_size
        # the masks that cut the lists leave no more than their own number
        return min(listed, problem.keys_per_query or listed, problem.window or listed)
    if problem.keys_per_query is not None:
        return problem.keys_per_query
    if problem.mask == "full":
        return seq_k
    seeing = min(seq_q, seq_k)
    keys = (seq_k - (seeing - 1) / 2) * seeing / seq_q
    return min(keys, problem.window or keys)
