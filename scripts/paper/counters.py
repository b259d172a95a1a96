"""Bytes by the GPU's own counters: Nsight Compute runs a piece of work in a separate process.

    python -m scripts.paper.counters '{"module": "scripts.paper.figure2_left", "work": "ours", "sizes": {}}'

runs that module's `work(name, sizes)` once to warm up and once between the profiler's marks;
`counted_bytes` calls it under ncu and adds up the kernels.
"""

import csv
import json
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import torch

from scripts.paper.memory import free_memory

# bytes to and from memory, and 32-byte sectors that the multiprocessors ask the L2 cache for
MEMORY = ("dram__bytes_read.sum", "dram__bytes_write.sum")
L2_SECTORS = "lts__t_sectors_srcunit_tex.sum"
SECTOR_BYTES = 32
# kernels are replayed once for each set of counters, with cold caches
TIME_LIMIT_SECONDS = 100


def counted_bytes(module: str, work: str, sizes: dict) -> dict | str:
    """{"memory": bytes, "l2": bytes} of one run of that work, or why they cannot be counted."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return "Nsight Compute (ncu) is not installed"
    # the work needs the GPU memory that this process still holds
    free_memory()
    task = json.dumps({"module": module, "work": work, "sizes": sizes})
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "counters.csv")
        command = [
            ncu, "--clock-control", "none", "--profile-from-start", "off", "--target-processes", "all",
            "--metrics", ",".join((*MEMORY, L2_SECTORS)), "--print-units", "base", "--csv", "--page", "raw",
            "--log-file", str(log),
            sys.executable, "-m", "scripts.paper.counters", task,
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIME_LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            return f"Nsight Compute took longer than {TIME_LIMIT_SECONDS} seconds"
        text = log.read_text(encoding="utf-8") if log.is_file() else ""
        if done.returncode or "dram__bytes" not in text:
            complaint = [
                line for line in (text + done.stdout + done.stderr).splitlines() if "==ERROR==" in line
            ]
            return f"Nsight Compute read no counters: {complaint[0] if complaint else done.stderr[-200:]}"
        try:
            return parse(text)
        except (KeyError, ValueError) as error:
            return f"Nsight Compute wrote a table of another form: {error!r}"


def parse(text: str) -> dict:
    """The sums over all kernels of ncu's raw page: a header, a line of units, then one line a kernel."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    table = csv.DictReader(lines)
    next(table)
    sums = dict.fromkeys((*MEMORY, L2_SECTORS), 0.0)
    for kernel in table:
        for metric in sums:
            sums[metric] += float(kernel[metric].replace(",", ""))
    return {"memory": sum(sums[metric] for metric in MEMORY), "l2": sums[L2_SECTORS] * SECTOR_BYTES}


def main(task: str) -> None:
    task = json.loads(task)
    run = import_module(task["module"]).work(task["work"], task["sizes"])
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1])
