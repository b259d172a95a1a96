"""The tuner: tiles are compared in turns. What a GPU measures is not tested here."""

from collections import Counter

import pytest
import torch

from kernels import block_masks
from kernels.portable import backward, forward
from kernels.tiles import Tile
from scripts import tune_tiles

TILES = [Tile(64, 64, 4, 2), Tile(64, 64, 4, 3), Tile(128, 64, 8, 2)]


def test_a_candidate_names_registers_and_form_or_leaves_them_to_the_compiler():
    assert tune_tiles.make_tile(64, 32, 4, 2, tma=False) == Tile(64, 32, 4, 2)
    tile = Tile(64, 32, 4, 2, True, 168, held=True, keys_first=True)
    assert tune_tiles.make_tile(64, 32, 4, 2, 168, 1, tma=True) == tile
    assert tune_tiles.make_tile(64, 32, 4, 2, 0, 1, tma=True) == tile._replace(registers=None)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kernels": ["dv"]}, "kernels must be of forward, dq, dkdv, got dv"),
        ({"causal": []}, "^nothing to measure: causal must not be empty, name one"),
        ({"candidates": [[64, 64, 4]]}, r"candidates must be lists of 4 to 6 numbers, got \[64, 64, 4\]"),
        ({"seq_lens": [1024, 3000]}, "seq_lens must divide tokens=16384, got 3000"),
        ({"tokens": 0}, "seq_lens must divide tokens=0, got 1024"),
        ({"head_dims": [96]}, "head_dims must divide width=2048, got 96"),
        ({"head_dims": [4]}, "^head_dims must be a multiple of 8 from 8 to 256, got 4"),
        ({"head_dims": [512]}, "^head_dims must be a multiple of 8 from 8 to 256, got 512"),
        ({"candidates": []}, "^nothing to measure: candidates must not be empty, name one"),
        ({"candidates": [[1, 2, 3, 4]]}, r"^candidates must have blocks of 16 or more .* got \[1, 2, 3, 4\]"),
        ({"candidates": [[64, 64, 4, 0]]}, r"^candidates must have .* got \[64, 64, 4, 0\]: change it"),
        ({"candidates": [[64, 64, 4, 2, 256]]}, r"^candidates must have .* registers up to 255 .* 256\]"),
        ({"candidates": [[64, 64, 4, 2, 0, 2]]}, r"^candidates must have .* a form of 0 or 1, got .* 2\]"),
        ({"window": 0, "causal": [True]}, "^window must be at least 1, got 0"),
        ({"best": -1}, "^best must be at least 1, got -1"),
        ({"dropout_p": 2.0}, "^dropout_p must be at least 0 and at most 0.9961, got 2.0"),
        # a full mask would be left out of its rows, or measured under the pattern once more
        ({"window": 64}, r"^window=64 is not measured with a full mask: use causal=\[true\]"),
        ({"pattern": "window(64)"}, r"^pattern=window\(64\) is not measured with a full mask: use causal"),
        ({"pattern": "windows(64)", "causal": [True]}, "is no pattern: combine"),
        (
            {"pattern": "window(64)", "window": 64, "causal": [True]},
            "window=64 and pattern=window.64. both say which keys",
        ),
    ],
)
def test_what_could_not_be_measured_is_refused_before_anything_is_compiled(given, message):
    with pytest.raises(ValueError, match=message):
        tune_tiles.main(tune_tiles.Arguments(**given))


def test_the_smallest_and_the_largest_tiles_may_be_measured():
    for tile in ([16, 16, 1, 1, 0, 0], [128, 16, 32, 1, 255, 1]):
        tune_tiles.check(tune_tiles.Arguments(candidates=[tile]))
    for tile in ([8, 16, 1, 1], [16, 16, 64, 1], [16, 16, 1, 1, 256]):
        with pytest.raises(ValueError, match="^candidates must have blocks of 16 or more and up to 32 warps"):
            tune_tiles.check(tune_tiles.Arguments(candidates=[tile]))


def test_the_tuners_own_candidates_are_tiles_and_compile_at_the_shortest_length(monkeypatch):
    lengths = []
    monkeypatch.setattr(tune_tiles, "launcher", lambda *given: lengths.append(given[-1]) or (lambda: None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    arguments = tune_tiles.Arguments(seq_lens=[1024, 512], tokens=1024)
    tune_tiles.check(arguments)
    for tile in tune_tiles.choose_candidates(arguments):
        assert tune_tiles.is_tile(*tile[:4])
    assert tune_tiles.compiles((arguments, "forward", 64, True, TILES[0]))
    assert lengths == [512]


def test_no_candidate_is_larger_than_a_block_of_the_mask_whose_keys_it_would_pass_over():
    sizes = [
        max(max(tile.block_m, tile.block_n) for tile in tune_tiles.choose_candidates(arguments))
        for arguments in (
            tune_tiles.Arguments(block_size=64),
            tune_tiles.Arguments(pattern="window(64)"),
            tune_tiles.Arguments(pattern="window(64)", block_size=64),
        )
    ]
    assert sizes == [128, 128, 64]
    given = [[64, 64, 4, 2], [128, 128, 4, 2], [128, 32, 8, 3]]
    arguments = tune_tiles.Arguments(pattern="window(64)", block_size=64, candidates=given, tma=[False])
    assert tune_tiles.choose_candidates(arguments) == [Tile(64, 64, 4, 2), Tile(64, 32, 8, 3)]


def test_candidates_are_measured_in_turns_and_a_card_that_slows_down_favours_none(monkeypatch):
    """Each turn takes 1% longer than the one before, whoever has it."""
    turns = []
    monkeypatch.setattr(tune_tiles, "launcher", lambda *given: turns.append(given[4]))
    monkeypatch.setattr(tune_tiles.triton.testing, "do_bench", lambda *_, **__: 1.01 ** len(turns))
    arguments = tune_tiles.Arguments(seq_lens=[4096])
    rows = tune_tiles.measure(arguments, "forward", 128, False, TILES)
    assert Counter(turns) == dict.fromkeys(TILES, tune_tiles.ROUNDS)
    assert [Tile(*row["tile"]) for row in rows] == TILES
    speeds = [row["tflops"][0] for row in rows]
    assert max(speeds) / min(speeds) < 1.03
    # two products of 4096 x 4096 scores a head, 4 sequences of 2048 channels in all
    flop = 2 * 2 * 16384 * 4096 * 2048
    assert speeds[1] == pytest.approx(flop / 1.01**8 / 1e9)


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_one_kernel_is_timed_alone_in_its_tile(kernel, monkeypatch):
    randn, launched = torch.randn, []

    def launch(kernel, *given, **options):
        launched.append((kernel, options["BLOCK_M"], options.get("BLOCK_N")))

    for module in (forward, backward):
        monkeypatch.setattr(module, "launch", launch)
        # put back afterwards, whatever the tuner leaves here
        monkeypatch.setattr(module, "choose_tile", module.choose_tile)
    monkeypatch.setattr(torch, "randn", lambda shape, **_: randn(shape))
    arguments = tune_tiles.Arguments(tokens=256, width=32)
    run = tune_tiles.launcher(arguments, kernel, 16, True, Tile(128, 32, 4, 2), 128)
    # what came before is not timed
    launched.clear()
    run()
    alone = getattr(forward if kernel == "forward" else backward, f"{kernel}_kernel")
    assert launched == [(alone, 128, 32)]


# of 8 by 8 a half; one, and seven times two; of blocks of 64 the three of the causal mask of 128 by 128
@pytest.mark.parametrize(
    ("given", "seq_len", "scores"),
    [({}, 8, 32), ({"window": 2}, 8, 15), ({"pattern": "causal()", "block_size": 64}, 128, 3 * 64**2)],
)
@pytest.mark.parametrize(("kernel", "products"), [("forward", 2), ("dq", 3), ("dkdv", 4)])
def test_a_kernels_speed_counts_its_products_of_the_scores_that_are_kept(
    given, seq_len, scores, kernel, products, monkeypatch
):
    monkeypatch.setattr(tune_tiles, "in_turns", lambda *given: dict.fromkeys(TILES, 2.0))
    monkeypatch.setattr(
        tune_tiles,
        "block_mask",
        lambda pattern, length, block_size: block_masks.parse(pattern, length, block_size=block_size),
    )
    arguments = tune_tiles.Arguments(seq_lens=[seq_len], tokens=2 * seq_len, width=48, **given)
    for row in tune_tiles.measure(arguments, kernel, 16, True, TILES):
        # two operations of each of two sequences and 48 channels, in two milliseconds
        assert row["tflops"] == [pytest.approx(products * 2 * 2 * 48 * scores / 2e-3 / 1e12)]


def test_the_fastest_tiles_are_printed_best_first(tmp_path, monkeypatch, capsys):
    class Pool:
        def __init__(self, *given, **named):
            self.map = map

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    speeds = dict(zip(TILES, ([1.0, 9.0], [8.0, 4.0], [2.0, 2.0]), strict=True))
    monkeypatch.setattr(tune_tiles.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tune_tiles.torch.cuda, "get_device_name", lambda: "none")
    monkeypatch.setattr(tune_tiles, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(tune_tiles, "compiles", lambda job: True)
    monkeypatch.setattr(tune_tiles, "choose_candidates", lambda arguments: TILES)
    monkeypatch.setattr(
        tune_tiles,
        "measure",
        lambda *given: [{"tile": list(tile), "tflops": speed} for tile, speed in speeds.items()],
    )
    arguments = tune_tiles.Arguments(
        kernels=["dq"], head_dims=[64], causal=[True], best=2, out=str(tmp_path / "tiles.json")
    )
    tune_tiles.main(arguments)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head == "dq head_dim 64 causal"
    # by the product of their speeds
    assert lines == [f"    {TILES[1]} [8, 4]", f"    {TILES[0]} [1, 9]"]


@pytest.mark.parametrize(
    ("given", "causal", "expected"),
    [
        ({"window": 64}, True, (True, 64)),
        ({"window": 64}, False, (False, None)),
        ({"pattern": "window(64)", "block_size": 64}, True, (False, None)),
    ],
)
def test_a_tile_is_measured_under_the_mask_that_its_row_names(given, causal, expected, monkeypatch):
    problems, randn = [], torch.randn
    monkeypatch.setattr(torch, "randn", lambda shape, **_: randn(shape))
    # which the launcher replaces: afterwards it is as before
    monkeypatch.setattr(tune_tiles.forward, "choose_tile", tune_tiles.forward.choose_tile)
    monkeypatch.setattr(tune_tiles.forward, "attention_forward", lambda problem, *_: problems.append(problem))
    monkeypatch.setattr(
        tune_tiles,
        "block_mask",
        lambda pattern, length, block_size: block_masks.parse(pattern, length, block_size=block_size),
    )
    arguments = tune_tiles.Arguments(tokens=256, width=32, **given)
    tune_tiles.launcher(arguments, "forward", 16, causal, Tile(128, 32, 4, 2), 128)()
    assert [(problem.causal, problem.window) for problem in problems] == [expected]
