"""Runs every test that needs a GPU or takes whichever device there is, and writes a table of the results:

    python -m tests.report docs/results/h200/gpu_tests.md [arguments for pytest]

One line for each promise, with the number of its cases, behind what those that failed said. Ends with
pytest's exit code. Stopped before its end by SIGINT, SIGTERM or SIGHUP, it writes the table of what has run
by then.
"""

import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import pytest
import torch

from train.results import provenance

RESULTS = {"failure": "failed", "error": "failed", "skipped": "skipped"}
# lines of what a failed case said
LAST_LINES = 30


def main(out: Path, arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-m", "gpu", f"--junitxml={junit}", *arguments]
        # a handler before the tests begin: a process that ignored SIGINT would have them ignore it, too
        for number in signal.SIGINT, signal.SIGTERM, signal.SIGHUP:
            # a closed terminal sends SIGHUP, which nohup has had ignored
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda *_: tests.send_signal(signal.SIGINT))
        # in a session of its own: interrupted by a terminal and by this process, it would write nothing
        tests = subprocess.Popen(command, start_new_session=True)
        code = tests.wait()
        cases = read_cases(junit)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(table(cases, provenance(1), whole=code != pytest.ExitCode.INTERRUPTED))
    print(out)
    return code


def read_cases(junit: Path) -> list[tuple[str, str, str, str]]:
    """File, promise and result of every case, and the end of what it said if it failed, else nothing."""
    cases = []
    for case in ElementTree.parse(junit).iter("testcase"):
        # the one in which pytest was interrupted
        if not case.get("name"):
            continue
        file = case.get("classname").split(".")[-1]
        promise = case.get("name").split("[")[0].removeprefix("test_").replace("_", " ")
        part = next((part for part in case if part.tag in RESULTS), None)
        result, said = "passed" if part is None else RESULTS[part.tag], ""
        if result == "failed":
            lines = (part.text or part.get("message")).splitlines()[-LAST_LINES:]
            said = "\n".join([f"{file}::{case.get('name')}", "", *lines])
        cases.append((file, promise, result, said))
    return cases


def table(cases: list[tuple[str, str, str, str]], origin: dict, *, whole: bool = True) -> str:
    """Markdown: where the cases ran, their sums, whether they are all, failures, a line for each promise."""
    counts: dict[tuple[str, str], Counter] = {}
    for file, promise, result, _ in cases:
        counts.setdefault((file, promise), Counter())[result] += 1
    kinds = ("passed", "failed", "skipped")
    total = sum(counts.values(), Counter())
    lines = [
        "# Tests on a GPU",
        "",
        ", ".join(f"{name} {value}" for name, value in origin.items()),
        "",
        ", ".join(f"{total[kind]} {kind}" for kind in kinds) + ("" if whole else ", stopped before the end"),
        "",
        *(f"```\n{said}\n```\n" for *_, said in cases if said),
        "| file | promise | passed | failed | skipped |",
        "|---|---|---|---|---|",
    ]
    for (file, promise), count in sorted(counts.items()):
        lines.append(f"| {file} | {promise} | " + " | ".join(str(count[k] or "") for k in kinds) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    if not torch.cuda.is_available():
        sys.exit("tests.report needs a CUDA GPU, none was found: the table would be of skipped tests")
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
