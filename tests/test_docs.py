"""The commands that README.md and docs/ tell their reader to type."""

import re
import shlex
from pathlib import Path

import pytest

from tests.test_config import composed
from train.config import parse

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# scripts/slurm.sh starts a process for each of a node's GPUs
GPUS_PER_NODE = 8


def commands(page: Path) -> list[list[str]]:
    """The words of every line in a fenced block, and of every text between backticks."""
    parts = page.read_text().replace("\\\n", " ").split("```")
    prose, blocks = "\n".join(parts[::2]), parts[1::2]
    lines = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    lines += [line for block in blocks for line in block.splitlines()]
    return [
        shlex.split(line, comments=True)
        for line in lines
        if re.search(r"-m train |make train|slurm.sh", line)
    ]


def trainings() -> list:
    """(processes, overrides) of each command that trains."""
    found = []
    for page in PAGES:
        for words in commands(page):
            options = dict(word.lstrip("-").split("=", 1) for word in words if "=" in word)
            processes = int(options.get("nproc-per-node", 1))
            if words[0] == "make":
                processes, overrides = int(options.get("NGPU", 1)), shlex.split(options.get("ARGS", ""))
            elif "scripts/slurm.sh" in words:
                processes = GPUS_PER_NODE * int(options["nodes"])
                overrides = words[words.index("scripts/slurm.sh") + 1 :]
            else:
                overrides = words[words.index("train") + 1 :]
            if "--multirun" in overrides:
                # the first run of the sweep
                overrides = [word.split(",")[0] for word in overrides if word != "--multirun"]
            found.append(pytest.param(processes, overrides, id=f"{page.name}: {' '.join(words)[:80]}"))
    return found


@pytest.mark.parametrize(("processes", "overrides"), trainings())
def test_a_training_command_of_the_docs_is_accepted_on_its_number_of_processes(processes, overrides):
    # placeholders, and weights that are not here
    given = [word for word in overrides if not word.startswith(("start.weights=", "data.tokenizer=FOLDER"))]
    config = parse(composed(*given, "start.weights=null"))
    config.check_processes(processes)
    assert config.accumulation(processes) >= 1
