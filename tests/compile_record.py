"""A record of what compilers made of our kernels, by a fingerprint of their input: none is compiled twice.

tests/compiled/ has a file for each compiler, with a row for each kernel that the tests compile ahead of time.
A fingerprint covers all the code that the kernel names (without comments and docstrings), its constants and
options, and the compiler's version. A kernel whose fingerprint has no row is compiled, which only takes
longer. `make record` rewrites the files; with COMPILE_ANEW=1 they are ignored.
"""

import ast
import hashlib
import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORDS = ROOT / "tests" / "compiled"
# our own, among all packages that a module imports
PACKAGES = ("kernels", "tests")


def compiled_once(compiler: str, name: str, given: str, code: Iterable[str], make: Callable) -> dict:
    """make(), or the row that it gave for the same input.

    compiler: its name and version. name: for readers. given: the compiler's input besides the code. code: as
    `definitions_behind` takes it. make: returns a dict that JSON can hold.
    """
    text = json.dumps([compiler, name, given, [code_behind(each) for each in code]], sort_keys=True)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:32]
    row = None if os.environ.get("COMPILE_ANEW") else record_of(compiler).get(fingerprint)
    if row is None:
        row = {"name": name} | make()
    if "NOTE_COMPILED" in os.environ:
        # a single write keeps a line in one piece while other processes write too
        with Path(os.environ["NOTE_COMPILED"]).open("a") as file:
            file.write(json.dumps([compiler, fingerprint, row]) + "\n")
    return {key: value for key, value in row.items() if key != "name"}


@cache
def record_of(compiler: str) -> dict[str, dict]:
    path = RECORDS / f"{compiler}.json"
    return json.loads(path.read_text()) if path.exists() else {}


@cache
def code_behind(code: str) -> str:
    """A hash of what `definitions_behind` finds."""
    found = [
        (*place, json.dumps(spelled(without_words(node))))
        for place, statements in definitions_behind(code).items()
        for node in statements
    ]
    return hashlib.sha256(json.dumps(sorted(found)).encode()).hexdigest()


def definitions_behind(code: str) -> dict[tuple[str, str], list[ast.stmt]]:
    """A definition and all of ours that it names, directly or not, as (module, name) and its statements.

    code: "module:name", or "module" for all that is defined there. What is not named, such as the host code
    that launches a kernel, is left out; of other packages only the statements that import them are there.
    """
    module, _, name = code.partition(":")
    unread = [(module, name)] if name else everything_in(module)
    assert all(place[1] in definitions_in(module) for place in unread or [("", "")]), f"{code} is not of ours"
    found = {}
    while unread:
        module, name = unread.pop()
        # a name that its module does not bind is local or built in
        statements = definitions_in(module).get(name)
        if statements and (module, name) not in found:
            found[module, name] = statements
            unread += [place for node in statements for place in named_in(node, module)]
    return found


@cache
def definitions_in(module: str) -> dict[str, list[ast.stmt]]:
    """By name, the statements of a module that bind it; empty for a module that is not ours."""
    path = ROOT / Path(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if module.split(".")[0] not in PACKAGES or not path.exists():
        return {}
    bound = defaultdict(list)
    for statement in ast.parse(path.read_text()).body:
        for part in one_by_one(statement):
            for name in names_bound_by(part):
                bound[name].append(part)
    return dict(bound)


def everything_in(module: str) -> list[tuple[str, str]]:
    return [(module, name) for name in definitions_in(module)]


def one_by_one(statement: ast.stmt) -> list[ast.stmt]:
    """An import of several names, as one statement for each: code that names one does not name the others."""
    if isinstance(statement, ast.ImportFrom):
        return [ast.ImportFrom(statement.module, [alias], statement.level) for alias in statement.names]
    return [statement]


def names_bound_by(statement: ast.stmt) -> set[str]:
    """The names that a module's statement binds; if none, as in a call, the names that it may change."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    bound = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    return bound or {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


def named_in(statement: ast.stmt, module: str) -> list[tuple[str, str]]:
    """(module, name) of everything that a statement of a module may read."""
    named = []
    # of a module that is imported whole, only the attributes that are named
    parts = {node.value: node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute)}
    for node in ast.walk(statement):
        if isinstance(node, ast.Name):
            part = parts.get(node)
            whole = module_behind(node.id, module) if part else None
            named.append((whole, part) if whole and part in definitions_in(whole) else (module, node.id))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                named += everything_in(alias.name)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} imports {node.module} by a relative name"
            for alias in node.names:
                named += everything_in(f"{node.module}.{alias.name}") or [(node.module, alias.name)]
    return named


def module_behind(name: str, module: str) -> str | None:
    """The module of ours that a name in a module stands for; None if it stands for something else."""
    match definitions_in(module).get(name):
        case [ast.ImportFrom(module=package, names=[alias])] if definitions_in(f"{package}.{alias.name}"):
            return f"{package}.{alias.name}"
    return None


def without_words(statement: ast.stmt) -> ast.stmt:
    """The statement without comments and docstrings."""
    for node in ast.walk(statement):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and is_text(body[0]):
            node.body = body[1:] or [ast.Pass()]
    return statement


def spelled(node) -> list | str:
    """A syntax tree as text that is the same in every Python: fields that only newer ones know are empty."""
    if isinstance(node, ast.AST):
        fields = ((name, value) for name, value in ast.iter_fields(node) if value not in (None, []))
        return [type(node).__name__, *([name, spelled(value)] for name, value in fields)]
    return [spelled(each) for each in node] if isinstance(node, list) else repr(node)


def is_text(node: ast.stmt) -> bool:
    is_constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return is_constant and isinstance(node.value.value, str)


def main(notes: str) -> None:
    """Rewrites the records of those compilers for which runs with NOTE_COMPILED noted a row."""
    records = {}
    for line in Path(notes).read_text().splitlines():
        compiler, fingerprint, row = json.loads(line)
        records.setdefault(compiler, {})[fingerprint] = row
    RECORDS.mkdir(exist_ok=True)
    for path in sorted(RECORDS.glob("*.json")):
        if path.stem not in records:
            print(f"{path}: as it was, its compiler was not asked")
    for compiler, rows in records.items():
        ordered = sorted(rows.items(), key=lambda item: (item[1]["name"], item[0]))
        lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(row)}" for key, row in ordered)
        (RECORDS / f"{compiler}.json").write_text(f"{{\n{lines}\n}}\n")
        print(f"{RECORDS / compiler}.json: {len(rows)} kernels")


if __name__ == "__main__":
    main(*sys.argv[1:])
