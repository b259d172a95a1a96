"""The commands and the Python that README.md and docs/ tell their reader to type."""

import ast
import builtins
import re
import shlex
from dataclasses import fields
from importlib import import_module
from pathlib import Path

import pytest

from scripts import benchmark_training
from tests.test_config import composed
from train.config import Config, parse

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# scripts/slurm.sh starts a process for each of a node's GPUs
GPUS_PER_NODE = 8
# what the text around a block of Python has
GIVEN = {"q", "k", "v"}


def commands(page: Path, of: str = r"-m train |make train|slurm.sh") -> list[list[str]]:
    """The words of every line in a fenced block, and of every text between backticks, in which `of` is."""
    parts = page.read_text().replace("\\\n", " ").split("```")
    prose, blocks = "\n".join(parts[::2]), parts[1::2]
    lines = [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    lines += [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line, comments=True) for line in lines if re.search(of, line)]


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_that_a_page_links_is_there(page):
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    files = [link for link in links if link and "://" not in link]
    assert [link for link in files if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_script_that_a_page_calls_has_the_arguments_that_it_is_given(page):
    for words in commands(page, of=r"-m scripts\.\w+"):
        place = next(place for place, word in enumerate(words) if word.startswith("scripts."))
        arguments = import_module(words[place]).Arguments
        known = {field.name for field in fields(arguments)}
        # of plan what it does not know is training's
        known |= set(Config.__annotations__) if "train" in known else set()
        # and of remeasure, the benchmark's whose commands it repeats
        known |= (
            {field.name for field in fields(benchmark_training.Arguments)} if "changes" in known else set()
        )
        given = {word.partition("=")[0] for word in words[place + 1 :] if re.match(r"[a-z_]+=", word)}
        assert given <= known, words


@pytest.mark.parametrize(("processes", "overrides"), trainings())
def test_a_training_command_of_the_docs_is_accepted_on_its_number_of_processes(processes, overrides):
    # placeholders, and weights that are not here
    given = [word for word in overrides if not word.startswith(("start.weights=", "data.tokenizer=FOLDER"))]
    config = parse(composed(*given, "start.weights=null"))
    config.check_processes(processes)
    assert config.accumulation(processes) >= 1


def python_blocks() -> list:
    """Each fenced block of Python, by its page and the line of its fence."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for block in re.finditer(r"^```(?:python|py)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, block.start()) + 1
            found.append(pytest.param(block[1], id=f"{page.name}:{line}"))
    return found


def undefined_names(code: str) -> set[str]:
    """The names that a module of this code reads, and neither makes, imports nor has from Python."""
    nodes = list(ast.walk(ast.parse(code)))
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    made = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    made |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    made |= {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    made |= {(name.asname or name.name).split(".")[0] for node in imports for name in node.names}
    return read - made - set(dir(builtins))


@pytest.mark.parametrize("code", python_blocks())
def test_python_of_the_docs_imports_what_there_is_and_uses_no_name_that_it_lacks(code):
    assert undefined_names(code) <= GIVEN
    imports = [node for node in ast.parse(code).body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), "imports", "exec"), {})


def test_a_name_that_a_block_lacks_is_found():
    code = "import a.b\nfrom c import d as e\ndef f(g):\n    return print(a, e, f, g, [h for h in i], d)\n"
    assert undefined_names(code) == {"i", "d"}
