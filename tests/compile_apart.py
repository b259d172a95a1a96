"""Runs ahead_of_time modules in separate processes, since in the tests' own Triton is the interpreter.

One process for each version of Triton answers all requests, since importing takes seconds:
    echo '["tests.ahead_of_time", ["arch=sm_90", "kernel=dq"], {}]' | python -m tests.compile_apart
"""

import json
import os
import subprocess
import sys
import traceback
from contextlib import redirect_stdout
from functools import cache
from importlib import import_module
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import pytest

# where `make test` puts the Triton of docs/results
OLDER = os.environ.get("TRITON_3_6", "")
is_missing = not Path(OLDER, "triton", "__init__.py").exists()
each_triton = pytest.mark.parametrize(
    "version",
    [
        "pinned",
        pytest.param("3.6.0", marks=pytest.mark.skipif(is_missing, reason="needs TRITON_3_6, see Makefile")),
    ],
)


@cache
def compiler(version: str) -> subprocess.Popen:
    """The process that has the Triton of that version; it ends with this one."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # a debugger's line information would take an eighth of the time, and changes no instruction
    environment["TRITON_DISABLE_LINE_INFO"] = "1"
    if version != "pinned":
        environment["PYTHONPATH"] = OLDER
    command = [sys.executable, "-m", "tests.compile_apart"]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def compile_apart(module: str, version: str, *arguments: str, **environment: str) -> list[dict]:
    """The rows that `python -m module arguments` prints, with the Triton of that version.

    environment: variables that the module reads while it runs, not as its process begins.
    """
    process = compiler(version)
    try:
        process.stdin.write(json.dumps([module, arguments, environment]) + "\n")
        answer = process.stdout.readline()
        assert answer, f"the compiler ended with {process.wait()}, standard error says why"
    except BaseException:
        # nobody will read what it still prints
        process.kill()
        compiler.cache_clear()
        raise
    printed, error = json.loads(answer)
    assert not error, error[-2000:]
    rows = [json.loads(line) for line in printed.splitlines()]
    assert version == "pinned" or {row["triton"] for row in rows} == {version}, rows
    return rows


def answer_requests() -> None:
    """Answers each line of standard input with what a module prints, and its error if any.

    A line is [module, arguments, environment], the last a dict.
    """
    for line in sys.stdin:
        module, arguments, environment = json.loads(line)
        printed, error = StringIO(), ""
        try:
            with redirect_stdout(printed), patch.dict(os.environ, environment):
                import_module(module).main(arguments)
        except (Exception, SystemExit):
            error = traceback.format_exc()
        print(json.dumps([printed.getvalue(), error]), flush=True)


if __name__ == "__main__":
    answer_requests()
