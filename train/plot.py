"""Loss curves of one run or several, and bars of a benchmark, as pictures."""

from io import BytesIO
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from train.logger import read_metrics
from train.whole_file import write_whole


def subplots(*grid: int, figsize: tuple[float, float], **options):
    """A figure and its panels, as pyplot.subplots gives them, but of no concern to anyone else.

    pyplot keeps figures until they are closed, and has one backend for the whole process: after a run a
    notebook's own pictures would no longer be shown.
    """
    figure = Figure(figsize=figsize, layout="constrained")
    return figure, figure.subplots(*grid, **options)


def draw_loss(runs: dict[str, Path], picture: Path, title: str) -> None:
    """Draws training loss (lines) and validation loss (dots) over tokens, one color per run.

    runs: label -> metrics.jsonl. Raises ValueError if a run has no training loss yet.
    """
    figure, axes = subplots(figsize=(8, 4.5))
    names = []
    for index, (label, path) in enumerate(runs.items()):
        color = f"C{index}"
        metrics = read_metrics(path)
        train = [(m["tokens"], m["train_loss"]) for m in metrics if m.get("train_loss") is not None]
        validation = [(m["tokens"], m["val_loss"]) for m in metrics if m.get("val_loss") is not None]
        if not train:
            raise ValueError(f"{path} holds no training loss yet: leave that run out until it has")
        names.append(f"{label}, training")
        axes.plot(*zip(*train, strict=True), color=color, linewidth=1.2, alpha=0.8)
        if validation:
            names.append(f"{label}, validation ({validation[-1][1]:.3f} at the end)")
            dots = {"color": color, "markersize": 4, "markeredgecolor": "black"}
            axes.plot(*zip(*validation, strict=True), "o", **dots)
    axes.set_xlabel("training tokens")
    axes.set_ylabel("cross-entropy, nats per token")
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    legend = axes.legend(axes.get_lines(), [str(number) for number in range(len(names))])
    for text, name in zip(legend.get_texts(), names, strict=True):
        # a name that begins with _ would be left out, and one with two $ read as a formula
        text.set(text=name, parse_math=False)
    axes.set_title(title, parse_math=False)
    save(figure, picture)


def draw_bars(values: dict[str, float | None], picture: Path, title: str, unit: str) -> None:
    """Draws one horizontal bar per label, the first on top, with its value beside it; None: out of memory."""
    figure, axes = subplots(figsize=(8, 0.45 * len(values) + 1.2))
    bars = axes.barh(list(values), [value or 0.0 for value in values.values()])
    names = ["out of memory" if value is None else f"{value:,.0f}" for value in values.values()]
    axes.bar_label(bars, names, padding=3)
    axes.invert_yaxis()
    axes.set_xmargin(0.15)
    axes.set_axisbelow(True)
    axes.set_xlabel(unit)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(axis="x", alpha=0.3)
    figure.suptitle(title)
    save(figure, picture)


def save(figure: Figure, picture: Path, dpi: int = 150) -> None:
    """Writes a picture in its ending's format; if that fails, as on a full disk, an earlier one stays."""
    image = BytesIO()
    figure.savefig(image, dpi=dpi, format=picture.suffix[1:])
    picture.parent.mkdir(parents=True, exist_ok=True)
    write_whole(picture, image.getvalue())


def length_label(tokens: int) -> str:
    """A length in tokens, as pictures show it: 16K, or in full if it is no multiple of 1024."""
    return str(tokens) if tokens % 1024 else f"{tokens // 1024}K"
