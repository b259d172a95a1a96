"""What tests import is no garbage: a run of training looks for some five times, half a second in all.

Python is not asked how much it leaves out, which takes it 20 ms, but told when it no longer does.
"""

import gc

unfreeze = gc.unfreeze
is_left_out = False


def leave_out() -> None:
    """What there is now, until gc.unfreeze() is called, as a run does at its end."""
    global is_left_out
    if not is_left_out:
        gc.freeze()
        is_left_out = True


def take_in() -> None:
    global is_left_out
    unfreeze()
    is_left_out = False


gc.unfreeze = take_in
