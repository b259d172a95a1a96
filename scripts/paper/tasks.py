"""Two tasks of the Long Range Arena that need no download, generated from a seed.

ListOps: the value, 0 to 9, of a nested prefix expression such as [MAX 4 3 [MIN 2 3] 1]. Pathfinder: whether
two marks in a picture are the ends of one path, beside others.

Sources: Tay et al., arXiv:2011.04006; Nangia and Bowman, arXiv:1804.06028; Linsley et al., arXiv:1805.08315.
The pictures are not those of the papers, so accuracies here compare attentions, not papers.
"""

import math
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import numpy as np

PADDING, CLOSE, FIRST_DIGIT = 0, 1, 2
OPERATIONS = (min, max, lambda values: sorted(values)[len(values) // 2], lambda values: sum(values) % 10)
FIRST_OPERATION = FIRST_DIGIT + 10
LISTOPS_VOCABULARY = FIRST_OPERATION + len(OPERATIONS)
MAX_DEPTH, MAX_ARGUMENTS, NESTED = 10, 10, 0.25
# lengths in a Pathfinder picture, in sixteenths of its side: radii of lines and marks, dash, gap, the least
# distance of a path from the edge, and of its end from the other path's mark; the round ends of two dashes
# close the gap between them
GRID = 16
LINE, MARK = 0.5, 1.0
DASH, GAP, EDGE, APART = 2.0, 0.5, 1.0, 3.0
DISTRACTOR_DASHES = 2
# the brightness of a line; a mark has 1
BRIGHTNESS = 0.5
GRAY_LEVELS = 256
EXAMPLES_IN_PART = 256


@dataclass(kw_only=True, slots=True, frozen=True)
class Scene:
    fewest_dashes: int
    most_dashes: int
    # short paths beside the two long ones
    distractors: int
    # the largest turn between two dashes, in radians
    turn: float
    # the least distance between two paths, in sixteenths of the side
    margin: float


# the scenes of pictures of fewer than 16 by 16 pixels, which can show no more, and of all others
SIMPLE = Scene(fewest_dashes=2, most_dashes=3, distractors=0, turn=0.25, margin=3.0)
FULL = Scene(fewest_dashes=2, most_dashes=4, distractors=1, turn=0.3, margin=2.5)


def listops(n: int, shortest: int, longest: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(n, longest) uint8 tokens, padded at the end, and (n,) int64 values; each has at least `shortest`."""
    rng = np.random.default_rng(seed)
    tokens, values = np.full((n, longest), PADDING, dtype=np.uint8), np.empty(n, dtype=np.int64)
    filled = 0
    while filled < n:
        expression, value = draw_expression(rng, 1, longest)
        if shortest <= len(expression) <= longest:
            tokens[filled, : len(expression)], values[filled] = expression, value
            filled += 1
    return tokens, values


def draw_expression(rng: np.random.Generator, depth: int, longest: int) -> tuple[list[int], int]:
    """Tokens and value; an expression that grows beyond `longest` is cut off, but is still too long."""
    operation = int(rng.integers(len(OPERATIONS)))
    tokens, values = [FIRST_OPERATION + operation], []
    for _ in range(int(rng.integers(2, MAX_ARGUMENTS + 1))):
        if len(tokens) > longest:
            break
        if depth < MAX_DEPTH and rng.random() < NESTED:
            argument, value = draw_expression(rng, depth + 1, longest)
        else:
            value = int(rng.integers(10))
            argument = [FIRST_DIGIT + value]
        tokens += argument
        values.append(value)
    return [*tokens, CLOSE], OPERATIONS[operation](values)


def pathfinder(n: int, side: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(n, side * side) uint8 gray levels, row by row, and (n,) int64: 1 where both marks are on one path."""
    pictures = [draw_picture(np.random.default_rng([seed, index]), side) for index in range(n)]
    tokens = np.stack([picture for picture, _ in pictures]).reshape(n, side * side)
    return tokens, np.array([label for _, label in pictures])


def draw_picture(rng: np.random.Generator, side: int) -> tuple[np.ndarray, int]:
    """A picture of two paths of equally many dashes and some short ones, all apart, and its label.

    With label 1 the marks are at both ends of one path, with 0 at one end of each. Both kinds have their
    marks equally far apart, so the distance tells nothing; the places of the marks tell a little, since the
    end of a path is nearer an edge than its start: they alone classify 57% of the pictures. Few dashes teach
    what many need. From a side of 16 on, a larger picture shows the same in finer pixels, not longer paths; a
    smaller one shows simpler scenes.
    """
    scene = FULL if side >= GRID else SIMPLE
    label = int(rng.integers(2))
    paths = []
    while not paths:
        dashes = int(rng.integers(scene.fewest_dashes, scene.most_dashes + 1))
        first = draw_path(rng, scene, dashes, np.zeros((0, 2)))
        if first is None:
            continue
        start, end = first[0, 0], first[-1, -1]
        circle = start, np.linalg.norm(end - start)
        # the first may leave no room for the second
        second = draw_path(rng, scene, dashes, first.reshape(-1, 2), circle)
        if second is None:
            continue
        # nearer ends would seem to lead from one mark to the other
        nearest = min(np.linalg.norm(second[-1, -1] - start), np.linalg.norm(second[0, 0] - end))
        if nearest >= APART:
            paths = [first, second]
    marks = (start, end) if label else (start, second[0, 0])
    for _ in range(scene.distractors):
        taken = np.concatenate([path.reshape(-1, 2) for path in paths])
        distractor = draw_path(rng, scene, DISTRACTOR_DASHES, taken)
        if distractor is not None:
            paths.append(distractor)
    pixels = side / GRID
    picture = np.zeros((side, side))
    for path in paths:
        for dash in path[:, [0, -1]]:
            paint(picture, np.linspace(*dash, 8) * pixels - 0.5, radius=LINE * pixels)
    picture *= BRIGHTNESS
    for mark in marks:
        paint(picture, mark[None] * pixels - 0.5, radius=MARK * pixels)
    return (picture * (GRAY_LEVELS - 1)).astype(np.uint8), label


def draw_path(
    rng: np.random.Generator,
    scene: Scene,
    dashes: int,
    taken: np.ndarray,
    circle: tuple[np.ndarray, float] | None = None,
) -> np.ndarray | None:
    """(dashes, 3, 2): start, middle and end of each dash; None if twenty attempts meet an edge or a path.

    taken: (n, 2), the points of other paths. circle: center and radius of the circle on which the path
    starts; without it, the path starts anywhere.
    """
    for _ in range(20):
        point, heading = rng.uniform(EDGE, GRID - EDGE, 2), rng.uniform(0, 2 * math.pi)
        if circle is not None:
            (center, radius), angle = circle, rng.uniform(0, 2 * math.pi)
            point = center + radius * np.array([math.cos(angle), math.sin(angle)])
        path = []
        for _ in range(dashes):
            step = np.array([math.cos(heading), math.sin(heading)])
            path.append([point, point + DASH / 2 * step, point + DASH * step])
            point = point + (DASH + GAP) * step
            heading += rng.uniform(-scene.turn, scene.turn)
        path = np.array(path)
        points = path.reshape(-1, 2)
        if points.min() < EDGE or points.max() > GRID - EDGE:
            continue
        apart = np.linalg.norm(points[:, None] - taken[None], axis=-1)
        if apart.size == 0 or apart.min() > scene.margin:
            return path
    return None


def paint(picture: np.ndarray, points: np.ndarray, radius: float) -> None:
    """Brightens the pixels within radius of any of the points (n, 2), with soft edges, in place."""
    side = len(picture)
    low = np.maximum(np.floor(points.min(0) - radius - 1).astype(int), 0)
    high = np.minimum(np.ceil(points.max(0) + radius + 2).astype(int), side)
    grid = np.stack(np.mgrid[low[0] : high[0], low[1] : high[1]], -1)
    distance = np.linalg.norm(grid[:, :, None] - points, axis=-1).min(-1)
    patch = picture[low[0] : high[0], low[1] : high[1]]
    np.maximum(patch, np.clip(radius + 0.5 - distance, 0, 1), out=patch)


def draw_in_parallel(task, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """task(n=, seed=) in parts over all cores; the examples do not depend on the number of cores."""
    seeds = [seed * 1_000_000 + part for part in range(-(-n // EXAMPLES_IN_PART))]
    if len(seeds) == 1:
        return task(n=n, seed=seeds[0])
    workers = min(len(os.sched_getaffinity(0)), len(seeds))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        parts = list(pool.map(partial(_draw_part, task, EXAMPLES_IN_PART), seeds))
    tokens, targets = (np.concatenate(column)[:n] for column in zip(*parts, strict=True))
    return tokens, targets


def _draw_part(task, n: int, seed: int):
    return task(n=n, seed=seed)
