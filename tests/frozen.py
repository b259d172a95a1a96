"""Imported last by the server that forks processes: what it has imported lives as long as they do.

A collection of garbage in one of them would look at all of it, and copy the memory that it lies in.
"""

import gc

from tests import garbage

gc.collect()
garbage.leave_out()
