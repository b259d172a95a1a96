import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("scripts", "train", "model", "kernels", "data")
# who may import which of our own rooms, besides itself
ALLOWED = {
    "scripts": {"train", "model", "kernels", "data"},
    "train": {"model", "data"},
    "model": {"kernels"},
    "kernels": set(),
    "data": set(),
}
# a library of the outside world, and the files or rooms that may know it
CONFINED = {
    "hydra": ("train/__main__.py", "train/overrides.py", "scripts/"),
    "omegaconf": ("train/__main__.py", "train/config.py", "train/overrides.py", "scripts/"),
    "wandb": ("train/logger.py",),
    "datasets": ("data/",),
    "tiktoken": ("data/",),
    "tokenizers": ("data/",),
    "tiktoken_ext": ("data/",),
    "triton": ("kernels/", "scripts/", "train/results.py"),
    "peft": ("train/lora.py",),
    "quack": ("kernels/epilogues.py",),
    "transformers": ("kernels/", "model/pretrained.py", "scripts/"),
}


def imported_modules(path: Path):
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, node.module


def violations(path: Path, name: str) -> list[str]:
    """Lines of the file `path`, which lies at `name` in the tree, that break a rule."""
    room = name.split("/")[0]
    found = []
    for line, module in imported_modules(path):
        top = module.split(".")[0]
        if top in ROOMS and top != room and top not in ALLOWED[room]:
            found.append(f"{name}:{line}: {room}/ must not import {module}")
        if top in CONFINED and not any(name.startswith(place) for place in CONFINED[top]):
            found.append(f"{name}:{line}: only {', '.join(CONFINED[top])} may import {top}")
    return found


def test_every_file_imports_only_what_its_room_may():
    files = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    assert len(files) > 20
    found = [line for path in files for line in violations(path, path.relative_to(ROOT).as_posix())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("kernels/a.py", "\nimport model.gpt", "kernels/a.py:2: kernels/ must not import model.gpt"),
        ("data/a.py", "from train import loop", "data/a.py:1: data/ must not import train"),
        ("train/a.py", "import kernels", "train/a.py:1: train/ must not import kernels"),
        ("train/loop.py", "import wandb", "train/loop.py:1: only train/logger.py may import wandb"),
        ("model/a.py", "def f():\n    import hydra", "model/a.py:2: only train/__main__.py"),
    ],
)
def test_a_forbidden_import_is_named_by_file_and_line(tmp_path, name, source, message):
    path = tmp_path / "a.py"
    path.write_text(source)
    assert violations(path, name)[0].startswith(message)


def test_a_command_can_be_refused_before_the_slow_parts_of_pytorch_are_imported():
    slow = ("torch._dynamo", "torch.distributed.tensor", "torch.distributed.checkpoint", "train.loop")
    ask = f"import sys, train.__main__; print([name for name in {slow} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
