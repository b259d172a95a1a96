"""The encoder on square pictures, pixel by pixel: its initial weights, hidden pixels, and symmetries.

Whether a path joins two marks shows in no pixel and in no pair of pixels, so that labels alone hardly train
the model at first. It helps to guess hidden pixels before, which teaches what lies beside what, and to begin
with few pixels.
Source: Amos, Berant and Gupta, "Never Train from Scratch", arXiv:2310.02980.
"""

import math
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scripts.paper import tasks
from scripts.paper.encoder import Encoder, attention_function, encoder_config, optimize, train_classifier
from train.config import Config

POSITIONS = "layers.position_embedding.weight"
# root mean square of the initial embeddings: a hundred steps at a rate of 1e-3 do not drown it
EMBEDDING_SCALE = 0.3
# angles of the slowest and the fastest wave along a side, in radians
SLOWEST, FASTEST = math.pi, 4 * math.pi
# the token of a hidden pixel, the next after the gray levels
HIDDEN = tasks.GRAY_LEVELS
HIDDEN_SHARE = 0.3
# side of a picture of two blocks of 128 pixels
COARSE = 16


class HiddenPixels(nn.Module):
    """The encoder's layers with a head that guesses the brightness of hidden pixels."""

    def __init__(self, encoder: Encoder):
        super().__init__()
        self.layers = encoder.layers
        self.head = nn.Linear(encoder.head.in_features, 1, device=encoder.head.weight.device)

    def loss(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Mean cross-entropy with the brightness of the hidden pixels, (); hidden: (B, T) bool."""
        states = self.layers.hidden_states(torch.where(hidden, HIDDEN, tokens))
        logits = self.head(states)[..., 0].float()  # (B, T)
        brightness = tokens / (tasks.GRAY_LEVELS - 1)
        losses = F.binary_cross_entropy_with_logits(logits, brightness, reduction="none")
        return (losses * hidden).sum() / hidden.sum()


def train_on_pictures(
    train: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    smaller: Encoder | None,
    *,
    n_layer: int,
    n_head: int,
    n_embd: int,
    attention: str,
    guessing_steps: int,
    steps: int,
    batch: int,
    learning_rate: float,
) -> tuple[Encoder, dict]:
    """A classifier of two classes and the results of train_classifier; train, test: as from draw_examples.

    smaller: the model of a smaller side, from whose weights this one starts; without it, this one guesses
    hidden pixels first. attention: a name that attention_function takes.
    """
    torch.manual_seed(0)
    seq_len, device = train[0].shape[1], train[0].device
    side = round(seq_len**0.5)
    config = encoder_config(seq_len, n_layer, n_head, n_embd, HIDDEN + 1, 0.0)
    model = Encoder(config, attention_function(attention, seq_len, device), 2)
    model.order = reading_order(side).to(device)
    if smaller is None:
        initialize(model, side)
    else:
        weights = smaller.state_dict()
        weights[POSITIONS] = stretched(weights[POSITIONS], side)
        model.load_state_dict(weights)
    model.to(device)
    options = {"batch": batch, "learning_rate": learning_rate}
    if smaller is None:
        guess_hidden_pixels(model, config, train[0], steps=guessing_steps, **options)
    return model, train_classifier(model, config, train, test, steps=steps, vary=turned, **options)


@torch.no_grad()
def initialize(model: Encoder, side: int) -> None:
    """Sets positions to waves along rows and columns, gray levels on a line; matrices keep the variance.

    GPT-2's standard deviation of 0.02 would make the layers of so narrow a model nearly linear.
    """
    layers = model.layers
    n_embd = model.head.in_features
    layers.position_embedding.weight.copy_(EMBEDDING_SCALE * grid_positions(side, n_embd))
    gray = torch.linspace(-1, 1, tasks.GRAY_LEVELS)[:, None]
    layers.token_embedding.weight[: tasks.GRAY_LEVELS] = EMBEDDING_SCALE * gray * torch.randn(n_embd)
    for module in layers.blocks.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
    nn.init.normal_(model.head.weight, std=0.02)


def grid_positions(side: int, n_embd: int) -> Tensor:
    """(side^2, n_embd) of mean square 1: waves of the row in one half of the channels, then of the column."""
    place = (torch.arange(side) + 0.5) / side
    frequencies = torch.logspace(math.log10(SLOWEST), math.log10(FASTEST), n_embd // 4)
    angles = place[:, None] * frequencies
    waves = math.sqrt(2) * torch.cat([angles.sin(), angles.cos()], -1)  # (side, n_embd / 2)
    rows = waves[:, None].expand(side, side, -1)
    return torch.cat([rows, rows.transpose(0, 1)], -1).reshape(side * side, n_embd)


def stretched(positions: Tensor, side: int) -> Tensor:
    """(side^2, C) embeddings of a grid's places, row by row, interpolated from those of a smaller grid."""
    smaller = round(len(positions) ** 0.5)
    grid = positions.T.reshape(1, -1, smaller, smaller)
    return F.interpolate(grid, size=(side, side), mode="bilinear").flatten(2)[0].T


def guess_hidden_pixels(
    model: Encoder, config: Config, pictures: Tensor, *, steps: int, batch: int, learning_rate: float
) -> float | None:
    """The last loss, in nats, after `steps` steps on pictures (n, T) without their labels."""

    def batches(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        picks = torch.randint(len(pictures), (batch,), generator=generator).to(pictures.device)
        tokens = turned(pictures[picks].long(), generator)
        hidden = torch.rand(tokens.shape, generator=generator) < HIDDEN_SHARE
        return tokens, hidden.to(tokens.device)

    return optimize(HiddenPixels(model), config, batches, steps, learning_rate)


def reading_order(side: int) -> Tensor:
    """(side^2,) int64: the order in which pixels are read, row by row up to a side of 16.

    A larger picture is read as several pictures of 16 by 16, each made of every second (fourth ...) row and
    column: first the upper halves of all, then the lower halves. So at 32 by 32 the two blocks of 128 keys
    that a query of the sparse mask sees are one such picture; read by rows, they would be two strips, joined
    to no others.
    """
    places = torch.arange(side * side)
    if side <= COARSE or side % COARSE:
        return places
    stride = side // COARSE
    # (half, coarse row, row within it, coarse column, column within it)
    grid = places.view(2, COARSE // 2, stride, COARSE, stride)
    return grid.permute(0, 2, 4, 1, 3).flatten()


def turned(tokens: Tensor, generator: torch.Generator) -> Tensor:
    """The pictures (B, side^2), each under one of the square's eight symmetries, drawn by the generator."""
    picks = torch.randint(8, (len(tokens),), generator=generator).to(tokens.device)
    side = round(tokens.shape[1] ** 0.5)
    return tokens.gather(1, symmetries(side, tokens.device)[picks])


@cache
def symmetries(side: int, device: torch.device) -> Tensor:
    """(8, side^2) int64: for each place, the place whose pixel moves there."""
    grid = torch.arange(side * side, device=device).view(side, side)
    return torch.stack([half.rot90(turns).flatten() for half in (grid, grid.T) for turns in range(4)])
