"""What compilers made of our kernels, by a fingerprint of all they were given: nothing is compiled twice.

tests/compiled/ has a file for each compiler, and in it a row for each kernel that the tests compile ahead of
time. A row counts only while its fingerprint is that of the code as it is (comments and docstrings apart), of
constants, options and the compiler's version: what has changed is compiled, and only takes longer.
`make record` writes the files anew; with COMPILE_ANEW=1 no row counts.
"""

import ast
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "tests" / "compiled"
# of ours, among all that a module imports
PACKAGES = ("kernels", "tests")


def compiled_once(compiler: str, name: str, given: str, modules: Iterable[str], make: Callable) -> dict:
    """make(), or the row that it gave for the same.

    compiler: with its version. name: for readers. given: what the compiler is given beside the code, which is
    that of the modules and of all of ours behind them. make() gives a dict that JSON can hold.
    """
    code = [code_behind(module) for module in modules]
    text = json.dumps([compiler, name, given, code], sort_keys=True)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:32]
    row = None if os.environ.get("COMPILE_ANEW") else record_of(compiler).get(fingerprint)
    if row is None:
        row = {"name": name} | make()
    if "NOTE_COMPILED" in os.environ:
        # a line is written in one piece, whoever else writes
        with Path(os.environ["NOTE_COMPILED"]).open("a") as file:
            file.write(json.dumps([compiler, fingerprint, row]) + "\n")
    return {key: value for key, value in row.items() if key != "name"}


@cache
def record_of(compiler: str) -> dict[str, dict]:
    path = RECORDS / f"{compiler}.json"
    return json.loads(path.read_text()) if path.exists() else {}


@cache
def code_behind(module: str) -> str:
    """A hash of the code of a module and of all of ours that it imports, and these in turn."""
    found, unread = {}, [module]
    while unread:
        name = unread.pop()
        path = ROOT / Path(*name.split(".")).with_suffix(".py")
        if name in found or not path.exists():
            continue
        tree = ast.parse(path.read_text())
        unread += [name for name in imported(tree) if name.split(".")[0] in PACKAGES]
        found[name] = without_words(tree)
    assert found, f"{module} is no module of {ROOT}"
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()


def imported(tree: ast.Module) -> list[str]:
    """Modules that may be imported there, and names in modules, which may be modules too."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def without_words(tree: ast.Module) -> str:
    """The code without comments and docstrings."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and is_text(body[0]):
            node.body = body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def is_text(node: ast.stmt) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


def main(notes: str) -> None:
    """Writes the record anew, of what runs with NOTE_COMPILED noted."""
    records = {}
    for line in Path(notes).read_text().splitlines():
        compiler, fingerprint, row = json.loads(line)
        records.setdefault(compiler, {})[fingerprint] = row
    RECORDS.mkdir(exist_ok=True)
    for path in RECORDS.glob("*.json"):
        path.unlink()
    for compiler, rows in records.items():
        ordered = sorted(rows.items(), key=lambda item: (item[1]["name"], item[0]))
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(row)}" for key, row in ordered)
        (RECORDS / f"{compiler}.json").write_text(f"{{\n{lines}\n}}\n")
        print(f"{RECORDS / compiler}.json: {len(rows)} kernels")


if __name__ == "__main__":
    main(*sys.argv[1:])
