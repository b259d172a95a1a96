"""Commands side by side, each on a GPU of its own: the next one starts as soon as one ends."""

import os
import subprocess
import time
from collections.abc import Iterator

import torch

SECONDS_BETWEEN_LOOKS = 0.1


def places(processes: int | None = None) -> list[str | None]:
    """Where commands run at the same time: the GPUs that this process sees, by CUDA_VISIBLE_DEVICES' names.

    processes: so many of them; without a GPU so many times None, which is the CPU. None: all, or one CPU.
    Raises ValueError if there are fewer GPUs, or processes is not positive.
    """
    if processes is not None and processes < 1:
        raise ValueError(f"processes must be at least 1, got {processes}")
    n_gpus = torch.cuda.device_count()
    if n_gpus == 0:
        return [None] * (processes or 1)
    if processes is not None and processes > n_gpus:
        raise ValueError(f"processes must be at most {n_gpus}, as many as there are GPUs, got {processes}")
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",")[:n_gpus] if named else [str(index) for index in range(n_gpus)]
    return gpus[:processes]


def run_side_by_side(
    commands: dict[str, list[str]], places: list[str | None]
) -> Iterator[tuple[str, int, float]]:
    """Runs each command, in their order as places become free; yields name, exit code and seconds at its end.

    A place is the CUDA_VISIBLE_DEVICES of its command, None leaves it alone. What still runs when the caller
    gives up is ended.
    """
    free, waiting, running = list(places), list(commands), {}
    try:
        while waiting or running:
            ended = [name for name, (process, *_) in running.items() if process.poll() is not None]
            done = [(name, *running.pop(name)) for name in ended]
            free += [place for *_, place in done]
            # before the caller hears of what has ended: a GPU does not wait for it
            while free and waiting:
                name, place = waiting.pop(0), free.pop(0)
                visible = {} if place is None else {"CUDA_VISIBLE_DEVICES": place}
                process = subprocess.Popen(commands[name], env={**os.environ, **visible})
                running[name] = process, time.perf_counter(), place
            for name, process, started, _ in done:
                yield name, process.returncode, time.perf_counter() - started
            if not done:
                time.sleep(SECONDS_BETWEEN_LOOKS)
    finally:
        for process, *_ in running.values():
            process.terminate()
        for process, *_ in running.values():
            process.wait()
