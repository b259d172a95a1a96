"""Finds a process that hangs, says which one and after which step, and ends the run so it can restart."""

import faulthandler
import json
import os
import sys
import threading
import time

from train.distributed import Processes

# EX_SOFTWARE of sysexits.h
EXIT_HANGS = 70
# beats within the time after which a process counts as hanging
BEATS = 10
# the longest time between two beats, within which a process hears that another one cannot go on
LONGEST_BEAT_SECONDS = 5.0
VERDICT = "watchdog/verdict"


class Watchdog:
    """While entered, a thread of each process publishes its progress and watches that of others.

    Processes that wait for each other all stand still. The one to blame has passed the fewest marks
    (Processes.mark), or its thread is silent too, since the process is stopped or gone. Rank 0 watches all
    ranks, the others watch rank 0. seconds: how long without progress until the run ends with EXIT_HANGS on
    every process; 0 switches the watchdog off.
    """

    def __init__(self, processes: Processes, seconds: float):
        self._processes = processes
        self._seconds = seconds
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self._seconds:
            self._tell(0)
            # every process publishes once before any of them looks
            self._processes.barrier()
            self._thread.start()
        return self

    def __exit__(self, *error) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _tell(self, beat: int) -> None:
        p = self._processes
        told = {"beat": beat, "step": p.step, "marks": p.marks, "pieces": p.pieces}
        p.store.set(f"watchdog/{p.rank}", json.dumps(told))

    def _watch(self) -> None:
        p = self._processes
        watched = range(p.world_size) if p.is_main else [0]
        news: dict[int, dict] = {}
        # when this process last saw a new beat, and a new mark or piece, of each rank
        beat_at = dict.fromkeys(watched, time.monotonic())
        mark_at = dict(beat_at)
        beat, interval = 0, min(LONGEST_BEAT_SECONDS, self._seconds / BEATS)
        while True:
            asleep = time.monotonic()
            if self._done.wait(interval):
                return
            awake = time.monotonic()
            if awake - asleep > interval + self._seconds / 2:
                # this whole process was stopped and goes on again: it has had no time to pass a mark
                beat_at = dict.fromkeys(watched, awake)
                mark_at = dict(beat_at)
            beat += 1
            try:
                self._tell(beat)
                if p.store.check([VERDICT]):
                    self._end(p.store.get(VERDICT).decode())
                latest = {rank: json.loads(p.store.get(f"watchdog/{rank}")) for rank in watched}
            except RuntimeError as error:
                # at the end of a run the store may be the first to go
                if self._done.wait(1.0):
                    return
                reason = str(error).splitlines()[0]
                self._end(f"LOST: the process that keeps the store, torchrun's or rank 0, is gone ({reason})")
            now = time.monotonic()
            for rank, told in latest.items():
                before = news.get(rank, {})
                if told["beat"] != before.get("beat"):
                    beat_at[rank] = now
                if any(told[name] != before.get(name) for name in ("marks", "pieces")):
                    mark_at[rank] = now
            news = latest
            silent = [rank for rank in watched if now - beat_at[rank] > self._seconds]
            still = all(now - mark_at[rank] > self._seconds for rank in watched)
            if silent or (still and p.is_main):
                fewest = min(told["marks"] for told in news.values())
                behind = silent or [rank for rank, told in news.items() if told["marks"] == fewest]
                verdict = self._verdict(behind, news, bool(silent))
                p.store.set(VERDICT, verdict)
                self._end(verdict)

    def _verdict(self, ranks: list[int], news: dict[int, dict], silent: bool) -> str:
        names = ", ".join(f"rank {rank} (last finished step {news[rank]['step']})" for rank in ranks)
        if len(ranks) == self._processes.world_size > 1:
            names = f"all ranks at the same place, {names}"
        seconds = f"for {self._seconds:g} seconds"
        if silent:
            return f"HANGS: {names}: stopped, or its host is gone {seconds}"
        return f"HANGS: {names}: no progress {seconds}; raise hang_seconds if a slow disk takes so long"

    def _end(self, reason: str) -> None:
        """Prints why and where this process stands, and ends it, whatever its main thread waits for."""
        ends = f"the run ends with code {EXIT_HANGS}"
        print(f"[rank {self._processes.rank}] {reason}; {ends}", file=sys.stderr, flush=True)
        try:
            faulthandler.dump_traceback(sys.__stderr__)
        finally:
            os._exit(EXIT_HANGS)
