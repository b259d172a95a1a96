"""What a model gains from its context, as a picture."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np


def draw_context(rows: list[dict], picture: Path) -> None:
    """Draws the rows of scripts/evaluate_context.py: two curves of the loss above two maps of recall."""
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    by_position = [row for row in rows if row["kind"] == "position"]
    axes[0, 0].plot([row["end"] for row in by_position], [row["loss"] for row in by_position], "o-")
    _label(axes[0, 0], "loss by position", "position, up to")
    by_context = [row for row in rows if row["kind"] == "context"]
    axes[0, 1].plot([max(row["context"], 1) for row in by_context], [row["loss"] for row in by_context], "o-")
    _label(axes[0, 1], "loss of the same tokens by length of context", "tokens of context")
    for panel, kind in zip(axes[1], ("passkey", "key_value"), strict=True):
        _draw_map(panel, [row for row in rows if row["kind"] == kind], kind.replace("_", "-"))
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150)
    plt.close(figure)


def _label(axes, title: str, x_label: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x_label)
    axes.set_ylabel("cross-entropy, nats per token")
    axes.set_xscale("log", base=2)
    axes.grid(alpha=0.3)


def _draw_map(axes, rows: list[dict], name: str) -> None:
    """Recall as colors: depth downwards, length to the right; the number in each field is its accuracy."""
    lengths, depths = (sorted({row[key] for row in rows}) for key in ("length", "depth"))
    accuracy = np.zeros((len(depths), len(lengths)))
    for row in rows:
        accuracy[depths.index(row["depth"]), lengths.index(row["length"])] = row["accuracy"]
    axes.imshow(accuracy, vmin=0.0, vmax=1.0, cmap="RdYlGn", aspect="auto")
    for (i, j), value in np.ndenumerate(accuracy):
        axes.text(j, i, f"{value:.0%}", ha="center", va="center")
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("depth of the answer")
    axes.set_title(f"{name} recall")
