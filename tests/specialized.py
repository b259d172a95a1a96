"""Prints the arguments of the portable kernels that Triton inspects to choose a compiled kernel.

Run by test_ahead_of_time.py in a separate process, because the other tests run Triton's interpreter:
    python -m tests.specialized
"""

import json
import sys

import triton

from tests.ahead_of_time import KERNELS


def main(arguments: list[str]) -> None:
    for name, kernel in KERNELS.items():
        looked_at = [x.name for x in kernel.params if not x.is_constexpr and not x.do_not_specialize]
        print(json.dumps({"kernel": name, "triton": triton.__version__, "specialized": looked_at}))


if __name__ == "__main__":
    main(sys.argv[1:])
