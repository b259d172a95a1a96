"""Who computes which tile, by the kernels' own functions, run as plain Python for every block of a grid."""

import heapq
import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from kernels import block_masks
from kernels.hopper import launch, schedule
from kernels.hopper.tiles import EVERY, forward_tile, key_section_bytes, section_heads
from kernels.problem import Problem


class Order:
    """A TileOrder of numbers, as the block of the fixture sees it."""

    def __init__(self, n_heads, n_tiles, section, last_first):
        self.n_heads, self.n_tiles, self.section, self.LAST_FIRST = n_heads, n_tiles, section, last_first
        # divisors themselves, see the fixture
        self.by_section_tiles, self.by_section = section * n_tiles, section
        self.by_last_section = n_heads % section or section

    def __getattr__(self, name):
        return partial(getattr(schedule.TileOrder, name).fn, self)


class Counter:
    def __init__(self, value):
        self.value = value

    def add(self, n, sem):
        self.value += n
        return self.value - n


@pytest.fixture
def grid(monkeypatch):
    """The block that is running, and how many there are."""
    grid = SimpleNamespace(block=0, n_blocks=1)
    language = SimpleNamespace(
        program_id=lambda axis: grid.block,
        num_programs=lambda axis: grid.n_blocks,
        where=lambda condition, a, b: a if condition else b,
        atomic_add=lambda counter, n, sem: counter.add(n, sem),
    )
    monkeypatch.setattr(schedule, "gl", language)
    monkeypatch.setattr(schedule, "quotient", lambda n, divisor: n // divisor)
    monkeypatch.setattr(schedule, "opaque", lambda n: n)
    return grid


@pytest.mark.parametrize("last_first", [False, True])
@pytest.mark.parametrize("dealt", [1, 2, EVERY])
@pytest.mark.parametrize(
    ("n_heads", "n_tiles", "section", "n_blocks"),
    [
        (1, 1, 1, 1),
        (5, 7, 2, 35),
        (5, 7, 2, 18),
        (5, 7, 2, 17),
        (12, 22, 12, 132),
        (64, 6, 24, 132),
        (3, 50, 1, 7),
    ],
)
def test_every_tile_is_taken_once(grid, n_heads, n_tiles, section, n_blocks, dealt, last_first):
    generator = random.Random(0)
    order = Order(n_heads, n_tiles, section, last_first)
    # where every tile is dealt nobody has cleared the counter
    counter = Counter(-9 if n_heads * n_tiles <= dealt * n_blocks else 0)
    grid.n_blocks = n_blocks
    turns = [0] * n_blocks
    taken, running = [], list(range(n_blocks))
    while running:
        grid.block = generator.choice(running)
        turn = turns[grid.block]
        i = order.next(turn, counter, dealt) if turn else order.dealt(turn)
        turns[grid.block] += 1
        if i < order.total():
            taken.append(order.find(i))
        else:
            running.remove(grid.block)
    assert sorted(taken) == [(head, tile) for head in range(n_heads) for tile in range(n_tiles)]


def test_blocks_that_are_dealt_all_tiles_of_a_causal_mask_get_as_much_work(grid):
    # four sections of heads with tiles of 1 to 22 blocks of keys
    order = Order(128, 22, 32, True)
    grid.n_blocks = 132
    loads = []
    for block in range(grid.n_blocks):
        grid.block = block
        turn, load = 0, 0
        while (i := order.dealt(turn)) < order.total():
            turn, load = turn + 1, load + 1 + order.find(i)[1]
        loads.append(load)
    assert max(loads) < 1.01 * sum(loads) / len(loads)


@pytest.mark.parametrize("seq", [1024, 2048, 4096, 16384, 65536])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_blocks_that_ask_a_counter_get_as_much_work_under_a_causal_mask(grid, head_dim, seq):
    """By count of steps. A block asks as it begins the last step of the tile before."""
    n_heads, tile = 2**25 // (seq * head_dim), forward_tile(head_dim, "causal", seq / 2)
    rows = tile.consumers * 64
    n_tiles, grid.n_blocks = -(-seq // rows), 132 * tile.blocks
    order = Order(n_heads, n_tiles, section_heads(seq, head_dim, "causal", 1, n_heads), True)
    counter, loads, turns = Counter(0), [0] * grid.n_blocks, [0] * grid.n_blocks
    # when a block asks, and which
    asking = [(0, block) for block in range(grid.n_blocks)]
    while asking:
        _, grid.block = heapq.heappop(asking)
        turn = turns[grid.block]
        i = order.next(turn, counter, tile.dealt) if turn else order.dealt(turn)
        if i < order.total():
            # of the keys up to the tile's last row; what a tile costs beside its steps is about one
            loads[grid.block] += 1 + -(-(order.find(i)[1] + 1) * rows // tile.block_n)
            turns[grid.block] += 1
            heapq.heappush(asking, (loads[grid.block] - 1, grid.block))
    assert max(loads) < 1.025 * sum(loads) / len(loads)


@pytest.mark.parametrize("mask", ["full", "causal", "window", "intervals", "blocks"])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 160, 256])
@pytest.mark.parametrize("group", [1, 4])
def test_keys_and_values_of_a_section_take_their_share_of_l2_or_are_one_head(mask, head_dim, group):
    n_heads = 48
    for seq_k in (1, 1000, 1024, 2048, 16384, 2**20):
        section = section_heads(seq_k, head_dim, mask, group, n_heads)
        assert section % group == 0
        assert group <= section <= n_heads
        kept = section // group * 4 * seq_k * head_dim
        most = key_section_bytes(mask, head_dim)
        assert kept <= most <= 32 * 2**20 or section == group
        # one more would not fit, but where sections of one size are smaller
        n_sections = -(-n_heads // section)
        larger = -(-n_heads // group // max(1, n_sections - 1))
        assert n_sections == 1 or larger * 4 * seq_k * head_dim > most


@pytest.mark.parametrize(
    ("dropout_p", "dtype", "room"),
    [
        (0.0, torch.bfloat16, True),
        (0.1, torch.bfloat16, True),
        (0.5, torch.bfloat16, False),
        (0.0, torch.float16, False),
    ],
)
def test_probabilities_have_room_but_in_float16_and_at_rates_close_to_a_half(dropout_p, dtype, room):
    assert launch.has_room(Problem(softmax_scale=1.0, causal=True, dropout_p=dropout_p), dtype) == room


@pytest.fixture
def small_gpu(monkeypatch):
    """A GPU of four multiprocessors, of which plans are made and nothing is launched."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 4)
    monkeypatch.setattr(launch, "memory_bandwidth", lambda device: 4917.0)


@pytest.mark.parametrize("group", [1, 2])
def test_a_backward_pass_has_sums_for_every_slot_and_rounds_the_last(group, small_gpu, monkeypatch):
    q = torch.empty(2, 1024, 4 * group, 64, dtype=torch.bfloat16, device="meta")
    problem = Problem(softmax_scale=1.0, causal=True)
    plan = launch.plan_backward(problem, q, q[:, :, :4])
    slots, heads = launch.SLOTS.value, plan.section * group
    assert (plan.section, plan.n_sections, plan.rounded_sections) == (1, 8, 7)
    assert plan.n_sums == slots * heads
    launched = []
    monkeypatch.setattr(launch, "launch", lambda kernel, grid, *given, **_: launched.append((grid, given)))
    tensors = launch.Tensors(*[q] * 14)
    launch.launch_round(problem, plan, tensors)
    ((grid, given),) = launched
    assert grid == (plan.padded // launch.PREPARE_ROWS, heads)
    # n_head, heads that are rounded, where the slot of the others begins
    assert given[5:8] == (4 * group, 7 * heads, 7 * heads % (slots * heads))


@pytest.mark.parametrize("has_blocks", [False, True])
def test_lists_read_whole_blocks_of_lse(has_blocks, small_gpu):
    blocks = tuple(block_masks.causal(130).tensors()) if has_blocks else ()
    problem = Problem(softmax_scale=1.0, causal=not has_blocks, deterministic=True, blocks=blocks)
    q = torch.empty(1, 130, 2, 64, dtype=torch.bfloat16, device="meta")
    assert launch.plan_backward(problem, q, q).padded == (256 if has_blocks else 192)
