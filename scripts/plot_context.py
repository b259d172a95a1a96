"""What a model gains from its context, as a picture."""

from pathlib import Path

import numpy as np

from train.plot import save, subplots

# models are compared from this many tokens of context on
FIRST_DRAWN = 16
# recall maps side by side, and inches per length in each
MAPS_ACROSS = 4
LENGTH_INCHES = 0.55


def draw_context(rows: list[dict], picture: Path) -> None:
    """Draws the rows of scripts/evaluate_context.py: two curves of the loss above two maps of recall."""
    figure, axes = subplots(2, 2, figsize=(11, 7.5))
    _label(axes[0])
    _draw_curves(axes[0], rows)
    for panel, kind in zip(axes[1], ("passkey", "key_value"), strict=True):
        _draw_map(panel, [row for row in rows if row["kind"] == kind], f"{kind.replace('_', '-')} recall")
    save(figure, picture)


def draw_comparison(measured: dict[str, list[dict]], picture: Path) -> None:
    """Draws both loss curves of several models, named by the keys, one panel for each kind of curve."""
    figure, axes = subplots(1, 2, figsize=(11, 4.5), sharey=True)
    _label(axes)
    for name, rows in measured.items():
        # the first positions have next to no context: their losses would flatten the rest
        _draw_curves(axes, rows, FIRST_DRAWN, label=name)
    axes[1].legend(frameon=False)
    save(figure, picture)


def draw_needles(measured: dict[str, list[dict]], picture: Path) -> None:
    """Draws the recall maps of several models: a passkey above, one key of many below."""
    across, groups = min(MAPS_ACROSS, len(measured)), -(-len(measured) // MAPS_ACROSS)
    most = max(len({row["length"] for row in rows if "length" in row}) for rows in measured.values())
    width = max(3.2, LENGTH_INCHES * most)
    figure, axes = subplots(2 * groups, across, figsize=(width * across, 6 * groups), squeeze=False)
    for panel in axes.flat:
        panel.set_axis_off()
    for index, (name, rows) in enumerate(measured.items()):
        group, column = divmod(index, across)
        for row, kind in enumerate(("passkey", "key_value")):
            panel = axes[2 * group + row, column]
            panel.set_axis_on()
            title = f"{name}: {kind.replace('_', '-')}"
            _draw_map(panel, [row for row in rows if row["kind"] == kind], title)
    save(figure, picture, dpi=100)


def _label(axes) -> None:
    """Call it before any curve: a logarithmic scale set later finds no limits in one that is all null."""
    axes[0].set(title="loss by position", xlabel="position, up to")
    axes[1].set(title="loss of the same tokens by length of context", xlabel="tokens of context")
    for panel in axes:
        panel.set_ylabel("cross-entropy, nats per token")
        panel.set_xscale("log", base=2)
        panel.grid(alpha=0.3)


def _draw_curves(axes, rows: list[dict], least: int = 0, **options) -> None:
    """Draws the loss by position, and by length of context, both from `least` on."""
    by_position = [row for row in rows if row["kind"] == "position" and row["first"] >= least]
    axes[0].plot([row["end"] for row in by_position], [row["loss"] for row in by_position], "o-", **options)
    by_context = [row for row in rows if row["kind"] == "context" and row["context"] >= least]
    # a logarithmic scale has no place for 0
    lengths = [max(row["context"], 1) for row in by_context]
    axes[1].plot(lengths, [row["loss"] for row in by_context], "o-", **options)


def _draw_map(axes, rows: list[dict], title: str) -> None:
    """Draws recall as colors: depth downwards, length to the right; each field shows accuracy above loss.

    A loss that is null or not finite is a dash.
    """
    lengths, depths = (sorted({row[key] for row in rows}) for key in ("length", "depth"))
    accuracy = np.zeros((len(depths), len(lengths)))
    loss = np.zeros_like(accuracy)
    for row in rows:
        field = depths.index(row["depth"]), lengths.index(row["length"])
        accuracy[field], loss[field] = row["accuracy"], row["loss"]
    axes.imshow(accuracy, vmin=0.0, vmax=1.0, cmap="RdYlGn", aspect="auto", alpha=0.7)
    for (i, j), value in np.ndenumerate(accuracy):
        nats = f"{loss[i, j]:.2f}" if np.isfinite(loss[i, j]) else "-"
        axes.text(j, i, f"{value:.0%}\n{nats}", ha="center", va="center", fontsize=8)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("depth of the answer")
    axes.set_title(title)
