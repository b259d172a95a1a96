"""Runs Python's cyclic garbage collector between steps, not inside them."""

import gc


class Collector:
    """While entered, after the first collect(), Python's cyclic garbage collector runs only in collect().

    Left alone, it stops a process for some milliseconds in the middle of a step, and with it all processes
    that wait for this one's gradients. Source: torchtitan (tools/utils.py, GarbageCollection).
    """

    def __enter__(self) -> "Collector":
        self._took_over = False
        return self

    def collect(self) -> None:
        """Call it where the device is waited for anyway; the first time after the first step."""
        gc.collect()
        if not self._took_over and gc.isenabled():
            # what exists now lives as long as the run: no need to examine it again
            gc.freeze()
            gc.disable()
            self._took_over = True

    def __exit__(self, *error) -> None:
        if self._took_over:
            gc.enable()
            gc.unfreeze()
