"""Imported last by the server that forks processes: what the server has imported lives as long as they do.

Garbage collection in one of these processes would visit all of it, and so copy the memory that holds it.
"""

import gc

from tests import garbage

gc.collect()
garbage.leave_out()
