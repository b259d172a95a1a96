"""Runs commands side by side, each on its own GPUs: the next one starts as soon as enough are free."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn

import torch

SECONDS_BETWEEN_LOOKS = 0.1
# for a command to save what it has and to end, before it is asked again
SECONDS_TO_END = 10.0


def places(processes: int | None = None) -> list[str | None]:
    """Where commands can run side by side: the GPUs that this process sees, as in CUDA_VISIBLE_DEVICES.

    processes: how many places; by default all GPUs. Without a GPU each place is None, the CPU, by default
    one. Raises ValueError if there are fewer GPUs, or processes is not positive.
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
    commands: dict[str, list[str]], places: list[str | None], needed: dict[str, int] | None = None
) -> Iterator[tuple[str, int, float]]:
    """Starts commands in order as places become free; as each ends, yields its name, exit code and seconds.

    A place becomes the CUDA_VISIBLE_DEVICES of its command; None leaves that variable alone. needed: how many
    places a command takes, one if not named; no command overtakes one that waits for several. Commands still
    running when the caller stops early, or is stopped by Ctrl-C or SIGTERM, are ended. Raises ValueError for
    a command that needs more places than there are.
    """
    needed = needed or {}
    for name, count in needed.items():
        if count > len(places):
            raise ValueError(f"{name} needs {count} GPUs, this machine has {len(places)}: leave it out")
    free, waiting, running, ends = list(places), list(commands), {}, {}

    def note_end(name: str, process: subprocess.Popen) -> None:
        process.wait()
        ends[name] = time.perf_counter()

    def end_too(number: int, frame) -> NoReturn:
        for process, *_ in running.values():
            process.send_signal(number)
        # as shells report it
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end_too)
    try:
        while waiting or running:
            ended = [name for name in running if name in ends]
            done = [(name, *running.pop(name)) for name in ended]
            free += [place for *_, taken in done for place in taken]
            # before yielding what has ended, so that no GPU waits for the caller
            while waiting and len(free) >= needed.get(waiting[0], 1):
                name = waiting.pop(0)
                taken = [free.pop(0) for _ in range(needed.get(name, 1))]
                visible = {} if None in taken else {"CUDA_VISIBLE_DEVICES": ",".join(taken)}
                started = time.perf_counter()
                process = subprocess.Popen(commands[name], env={**os.environ, **visible})
                running[name] = process, started, taken
                # a thread, since the caller may be busy with another one when this one ends
                threading.Thread(target=note_end, args=(name, process), daemon=True).start()
            for name, process, started, _ in done:
                yield name, process.returncode, ends[name] - started
            if not done:
                time.sleep(SECONDS_BETWEEN_LOOKS)
    finally:
        end([process for process, *_ in running.values()])
        signal.signal(signal.SIGTERM, before)


def end(processes: list[subprocess.Popen]) -> None:
    """Ends processes, which first may save what they have; another Ctrl-C ends the patience with them."""
    # None: the terminal's Ctrl-C, or the caller's SIGTERM, has reached them too
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        with suppress(KeyboardInterrupt, SystemExit):
            if number is not None:
                for process in processes:
                    process.send_signal(number)
            given_up = time.monotonic() + SECONDS_TO_END
            while any(process.poll() is None for process in processes) and time.monotonic() < given_up:
                time.sleep(SECONDS_BETWEEN_LOOKS)
