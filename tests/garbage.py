"""Keeps garbage collection away from what tests import: in a training run it takes half a second.

A run collects some five times. Whether objects are left out is noted here: asking Python would take 20 ms.
"""

import gc

unfreeze = gc.unfreeze
is_left_out = False


def leave_out() -> None:
    """Leaves out all objects that exist now, until gc.unfreeze() is called, as a run does at its end."""
    global is_left_out
    if not is_left_out:
        gc.freeze()
        is_left_out = True


def take_in() -> None:
    global is_left_out
    unfreeze()
    is_left_out = False


gc.unfreeze = take_in
