"""Kills training runs a hundred times at random moments and compares them with runs that were not killed:
make soak, or python tests/soak.py kills=100 out=soak.json"""

import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
os.environ["HF_HUB_OFFLINE"] = "1"

import faults  # noqa: E402, found by the lines above

from scripts.arguments import OVERWRITE, argument, result_file, run_script  # noqa: E402
from train.results import write_result  # noqa: E402

# processes, how the model is spread over them, and what slows them
CASES = [
    (1, "ddp", faults.no_fault),
    (1, "ddp", faults.slow_disk),
    (2, "ddp", faults.slow_disk),
    (2, "fsdp", faults.no_fault),
    (4, "ddp", faults.no_fault),
]


@dataclass
class Arguments:
    kills: int = argument(100, "over five cases, a fifth each; a multiple of 5")
    seed: int = argument(1, "of the moments of the kills")
    out: str = result_file("", "JSON file for the rows; empty for none")
    overwrite: bool = argument(False, OVERWRITE)


def main(arguments: Arguments) -> None:
    if arguments.kills < len(CASES) or arguments.kills % len(CASES):
        raise ValueError(f"kills must be a multiple of {len(CASES)} above 0, got {arguments.kills}")
    out = Path(arguments.out).resolve() if arguments.out else None
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        faults.write_corpus(Path(folder))
        for case, (world_size, distributed, fault) in enumerate(CASES):
            kills = arguments.kills // len(CASES)
            # a run makes ten to fifty steps before each kill: this is enough for all kills
            steps = 60 * kills
            whole, killed = (
                faults.small_config(f"{name}-{case}", steps, f"distributed={distributed}")
                for name in ("whole", "killed")
            )
            started = time.monotonic()
            faults.complete(whole, world_size, fault, seconds=600)
            in_a_save = faults.kill_at_random(killed, kills, arguments.seed + case, world_size, fault)
            faults.assert_same_run(whole.name, killed.name, steps)
            rows.append(
                {
                    "processes": world_size,
                    "distributed": distributed,
                    "fault": fault.__name__,
                    "kills": kills,
                    "kills_in_a_save": in_a_save,
                    "steps": steps,
                    # an assertion has compared weights, optimizer state and metrics
                    "bitwise_equal": True,
                    "seconds": round(time.monotonic() - started, 1),
                }
            )
            print(rows[-1], flush=True)
            if out:
                write_result(out, rows)
        os.chdir(ROOT)


if __name__ == "__main__":
    run_script(main, Arguments, __doc__)
