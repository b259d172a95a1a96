"""The partitions of a kernel on a CPU, for gluon_on_cpu.py: threads, and the barriers between them."""

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace


class DeadlockError(RuntimeError):
    pass


class Partitions:
    """Threads of which one runs at a time, chosen at random where one waits or signals."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        # each partition waits at a gate of its own, so that a signal wakes nobody else
        self.gates: dict[int, threading.Semaphore] = {}
        # what each partition waits for; None: it can go on
        self.wanted: dict[int, Callable[[], bool] | None] = {}
        # bulk copies into shared memory that are on their way
        self.arriving: list[Callable[[], None]] = []
        self.errors: list[BaseException] = []
        self.own = threading.local()

    def run(self, parts: list[tuple]) -> None:
        threads = [threading.Thread(target=self.part, args=(i, *part)) for i, part in enumerate(parts)]
        self.wanted = dict.fromkeys(range(len(parts)))
        self.gates = {number: threading.Semaphore(0) for number in self.wanted}
        for thread in threads:
            thread.start()
        self.gates[self.random.randrange(len(parts))].release()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]

    def part(self, number: int, function: Callable, arguments: tuple) -> None:
        self.own.number, self.own.products, self.own.copies = number, [], []
        try:
            self.wait_at_gate()
            function(*arguments)
            assert not self.own.products, "a product is never waited for"
            assert not self.own.copies, "the end of a copy is never waited for"
        except BaseException as error:
            self.errors.append(error)
        del self.wanted[number]
        self.open_gate(self.choose())

    def wait_until(self, condition: Callable[[], bool] = lambda: True) -> None:
        """Gives up this partition's turn, and returns in another one, once the condition holds."""
        own = self.own.number
        self.wanted[own] = condition
        chosen = self.choose()
        if chosen != own:
            self.open_gate(chosen)
            self.wait_at_gate()
        self.wanted[own] = None

    def open_gate(self, chosen: int | None) -> None:
        """Lets the chosen partition go on; if there is none, all that are left, which end with an error."""
        for number in self.gates if chosen is None else [chosen]:
            self.gates[number].release()

    def wait_at_gate(self) -> None:
        self.gates[self.own.number].acquire()
        if self.errors:
            raise DeadlockError("another partition has failed")

    def arrive(self, copy: Callable[[], None]) -> None:
        """Makes a copy at once or, at random, later: behind others that were issued after it, too."""
        if self.random.random() < 0.5:
            copy()
        else:
            self.arriving.append(copy)

    def choose(self) -> int | None:
        """The partition that goes on; none after an error, when all run at once."""
        if self.errors:
            return None
        able = self.able()
        while self.arriving and not self.errors and (not able or self.random.random() < 0.3):
            try:
                self.arriving.pop(self.random.randrange(len(self.arriving)))()
            except AssertionError as error:
                self.errors.append(error)
            able = self.able()
        if not able and self.wanted and not self.errors:
            self.errors.append(DeadlockError(f"partitions {sorted(self.wanted)} wait for each other"))
        return self.random.choice(able) if able and not self.errors else None

    def able(self) -> list[int]:
        return [number for number, wanted in self.wanted.items() if wanted is None or wanted()]


# the program that runs: its number, how many there are, its partitions, and arrivals at its named barriers
program = SimpleNamespace(id=0, count=1, partitions=None, named={})


def complete(pending: list, n_left: int) -> None:
    """Runs what was issued, in order, but for the last n_left."""
    while len(pending) > n_left:
        pending.pop(0)()


class Barrier:
    """An mbarrier: a phase ends once all arrivals and all announced bytes have come."""

    def __init__(self):
        self.count = self.left = self.bytes = self.phase = 0

    def arrive(self, n_arrivals=1, n_bytes=0):
        self.left -= n_arrivals
        self.bytes += n_bytes
        self.end_phase()
        program.partitions.wait_until()

    def receive(self, n_bytes):
        self.bytes -= n_bytes
        self.end_phase()

    def end_phase(self):
        assert self.left >= 0, "more arrivals than the barrier expects"
        if self.left == 0 and self.bytes == 0:
            self.phase += 1
            self.left = self.count


class Barriers:
    def __init__(self, n: int):
        self.barriers = [Barrier() for _ in range(n)]

    def index(self, i):
        return self.barriers[int(i)]


def init_barrier(barrier, count):
    barrier.count = barrier.left = count


def wait_barrier(barrier, phase, pred=True):
    if pred:
        program.partitions.wait_until(lambda: barrier.phase % 2 != int(phase) % 2)


def named_barrier(number: int, n_warpgroups: int, waits: bool) -> None:
    """bar.sync or bar.arrive of one of so many warpgroups: the last one makes it complete."""
    arrived = program.named[number] = program.named.get(number, 0) + 1
    meeting = -(-arrived // n_warpgroups) * n_warpgroups
    program.partitions.wait_until((lambda: program.named[number] >= meeting) if waits else lambda: True)
