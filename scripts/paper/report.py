"""The report: every verdict in one table, then each experiment with its picture and its numbers."""

import json
import traceback
from dataclasses import replace
from pathlib import Path
from types import ModuleType

from scripts.paper.verdict import NOT_MEASURED, NOT_REACHED, REACHED, Verdict
from train.results import machine
from train.whole_file import write_whole

MARKS = {REACHED: "**reached**", NOT_REACHED: "**not reached**", NOT_MEASURED: "not measured"}
TITLE = "# The FlashAttention paper, measured again\n"


def check_report(folder: Path) -> None:
    """Raises ValueError for a folder whose README.md is no report, since a report would replace it."""
    path = folder / "README.md"
    if path.exists() and not path.read_text(encoding="utf-8", errors="replace").startswith(TITLE):
        raise ValueError(f"{path} is no report of this script, which would replace it: choose another out=")


def write_report(folder: Path, experiments: dict[str, ModuleType]) -> Path:
    """Writes folder/README.md from the result files in the folder, and draws the pictures again.

    experiments: name -> module, in the order of the report.
    """
    summary, sections = [], []
    for name, experiment in experiments.items():
        try:
            lines, text = section(folder / f"{name}.json", experiment)
        except Exception as error:
            # rows that this code cannot read must not hide the verdicts on the others
            traceback.print_exc()
            lines, text = [["", "", "", "failed"]], f"The report of these rows failed: {error!r}"
        summary += [[experiment.TITLE.split(":")[0], *line] for line in lines]
        sections.append(f"## {experiment.TITLE}\n\n{experiment.PAPER.strip()}\n\n{text}\n")
    header = ["experiment", "claim", "paper", "here (needed)", "verdict"]
    text = (
        f"{TITLE}\n"
        "Dao, Fu, Ermon, Rudra, Ré, arXiv:2205.14135; numbers are those of version 2 unless a line says "
        "otherwise, on one A100. `python -m scripts.reproduce_paper` wrote this file.\n\n"
        f"{markdown(header, summary)}\n\n" + "\n".join(sections)
    )
    report = folder / "README.md"
    write_whole(report, text)
    return report


def section(whole: Path, experiment: ModuleType) -> tuple[list[list[str]], str]:
    """An experiment's table lines and text, from its rows in `whole`; draws its picture beside them."""
    # a part file holds the latest try, which did not finish
    path = part_of(whole) if part_of(whole).is_file() else whole
    if not path.is_file():
        return [["", "", "", "not run"]], f"Not run: `python -m scripts.reproduce_paper {whole.stem}`"
    result = json.loads(path.read_text(encoding="utf-8"))
    rows, picture = result["rows"], whole.with_suffix(".png")
    verdicts = [with_reason(verdict, result) for verdict in experiment.judge(rows)]
    experiment.draw(rows, picture)
    text = (
        f"**Here:** {experiment.HERE.strip()}\n\n![{experiment.TITLE}]({picture.name})\n\n"
        f"{experiment.describe(rows)}\n\n{notes(verdicts)}{origin(path, result)}"
    )
    return [verdict_line(verdict) for verdict in verdicts], text


def part_of(path: Path) -> Path:
    """The file that holds an experiment's rows while it runs, and keeps them if it does not finish."""
    return path.with_suffix(".part.json")


def with_reason(verdict: Verdict, result: dict) -> Verdict:
    """The verdict; one that was not measured says why."""
    if verdict.ours is not None or verdict.note:
        return verdict
    reason = "this run left out the sizes or implementations that it needs"
    return replace(verdict, note="this machine has no GPU" if result["gpu"] is None else reason)


def verdict_line(verdict: Verdict) -> list[str]:
    bound = "at most" if verdict.at_most else "at least"
    needed = f"{bound} {number(verdict.gate)}{verdict.unit}"
    here = f"({needed})" if verdict.ours is None else f"{number(verdict.ours)}{verdict.unit} ({needed})"
    return [verdict.claim, verdict.paper, here, MARKS[verdict.word]]


def notes(verdicts: list[Verdict]) -> str:
    lines = [f"* {verdict.claim}: {verdict.note}" for verdict in verdicts if verdict.note]
    return "\n".join(lines) + "\n\n" if lines else ""


def origin(path: Path, result: dict) -> str:
    state = "**Interrupted: some rows are missing.** " if path.name.endswith(".part.json") else ""
    made = f"{machine(result)}, {result['date']}, commit {result['commit']}"
    return f"{state}[{path.name}]({path.name}): {made}.\n"


def markdown(header: list[str], lines: list[list]) -> str:
    """A Markdown table; None is an empty cell."""
    cells = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(map(cell, line)) + " |" for line in cells)


def rows_table(rows: list[dict], columns: tuple[str, ...]) -> str:
    """These columns of the rows, as Markdown; bytes in GB."""

    def shown(row: dict, column: str):
        x = row.get(column)
        return x / 1e9 if x is not None and column.endswith("_bytes") else x

    header = [column.replace("_bytes", "_gb") for column in columns]
    return markdown(header, [[shown(row, column) for column in columns] for row in rows])


def cell(x) -> str:
    if x is None:
        return ""
    return number(x) if isinstance(x, float) else str(x)


def number(x: float) -> str:
    """Four significant digits, without an exponent for numbers of ordinary size."""
    if x == 0 or 1e-3 <= abs(x) < 1e6:
        digits = f"{x:.4g}"
        return digits if "e" not in digits else f"{x:.0f}"
    return f"{x:.3e}"
