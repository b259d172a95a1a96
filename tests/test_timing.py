"""How calls on a GPU are timed, with a clock in place of a GPU."""

from types import SimpleNamespace

import pytest

from scripts import timing

# milliseconds that clearing the cache takes
CLEARING = 0.06
# the clock of an H200 falls so many milliseconds after a load has begun
CLOCK_FALLS = 45


class GPU:
    """Has a clock in milliseconds, and notes how long it is busy from pause to pause."""

    def __init__(self, monkeypatch):
        self.now, self.turns = 0.0, [0.0]
        cuda = SimpleNamespace(synchronize=lambda: None, Event=lambda enable_timing: Event(self))
        cache = SimpleNamespace(zero_=lambda: self.work(CLEARING))
        torch = SimpleNamespace(cuda=cuda, int8=None, empty=lambda *_, **__: cache)
        monkeypatch.setattr(timing, "torch", torch)
        monkeypatch.setattr(timing.time, "sleep", lambda seconds: self.turns.append(0.0))

    def work(self, milliseconds: float) -> None:
        self.now += milliseconds
        self.turns[-1] += milliseconds


class Event:
    def __init__(self, gpu: GPU):
        self.gpu = gpu

    def record(self) -> None:
        self.at = self.gpu.now

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


def test_a_call_that_takes_longer_than_a_turn_is_timed_too(monkeypatch):
    gpu = GPU(monkeypatch)
    assert timing.median_ms(lambda: gpu.work(30.0)) == pytest.approx(30.0)


@pytest.mark.parametrize("milliseconds", [0.01, 0.3, 2.1, 4.9, 8.7, 14.0])
def test_calls_are_timed_alone_before_the_clock_falls(milliseconds, monkeypatch):
    gpu, calls = GPU(monkeypatch), []
    # the first call takes longer, as one that waits for the GPU to wake up
    measured = timing.median_ms(lambda: calls.append(gpu.work(milliseconds + 5.0 * (not calls))))
    assert measured == pytest.approx(milliseconds)
    assert len(calls) > timing.LEAST_CALLS
    assert gpu.turns[0] == 0.0
    assert max(gpu.turns) < CLOCK_FALLS
