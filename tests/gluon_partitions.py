"""The partitions of a kernel on a CPU, for gluon_on_cpu.py: coroutines, and the barriers between them."""

import random
from collections.abc import Callable
from types import SimpleNamespace

from greenlet import greenlet


class DeadlockError(RuntimeError):
    pass


class Partition:
    """A coroutine that runs until it waits for something or signals."""

    def __init__(self, function: Callable, arguments: tuple):
        self.coroutine = greenlet(lambda: function(*arguments))
        # what it waits for; None: it can go on
        self.wanted: Callable[[], bool] | None = None
        # what it has issued and not waited for: products, and copies to global memory
        self.products: list[Callable[[], None]] = []
        self.copies: list[Callable[[], None]] = []

    def able(self) -> bool:
        return self.wanted is None or self.wanted()

    def run(self) -> bool:
        """Runs until the partition waits or ends; whether it has ended."""
        self.coroutine.switch()
        if self.coroutine.dead:
            assert not self.products, "a product is never waited for"
            assert not self.copies, "the end of a copy is never waited for"
        return self.coroutine.dead


class Partitions:
    """Those of a thread block, of which one runs at a time, chosen at random where one waits or signals."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        # bulk copies into shared memory that are on their way
        self.arriving: list[Callable[[], None]] = []
        self.own: Partition | None = None
        self.scheduler: greenlet | None = None

    def run(self, parts: list[tuple]) -> None:
        # a coroutine that fails or ends goes on here
        self.scheduler = greenlet.getcurrent()
        partitions = [Partition(*part) for part in parts]
        while partitions:
            self.own = self.choose(partitions)
            if self.own.run():
                partitions.remove(self.own)

    def choose(self, partitions: list[Partition]) -> Partition:
        able = [partition for partition in partitions if partition.able()]
        while self.arriving and (not able or self.random.random() < 0.3):
            self.arriving.pop(self.random.randrange(len(self.arriving)))()
            able = [partition for partition in partitions if partition.able()]
        if not able:
            raise DeadlockError(f"{len(partitions)} partitions wait for each other")
        return self.random.choice(able)

    def wait_until(self, condition: Callable[[], bool] | None = None) -> None:
        """Gives up this partition's turn, and returns in another one, once the condition holds."""
        self.own.wanted = condition
        self.scheduler.switch()

    def arrive(self, copy: Callable[[], None]) -> None:
        """Makes a copy at once or, at random, later: behind others that were issued after it, too."""
        if self.random.random() < 0.5:
            copy()
        else:
            self.arriving.append(copy)


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
    program.partitions.wait_until((lambda: program.named[number] >= meeting) if waits else None)
