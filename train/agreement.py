"""What the processes of a run must have in common, whichever hosts they are on: their settings."""

from collections.abc import Iterator
from dataclasses import asdict

from train.config import Config
from train.distributed import Processes

# a host may keep its text elsewhere (its tokens are compared, train/loop.py), and rank 0 alone talks to wandb
OWN = ("data", "wandb")


def refuse_other_settings(config: Config, processes: Processes) -> None:
    """Raises ValueError, on every rank, if any has other settings than rank 0.

    An edit in one host's conf/ is enough: weights drift apart, or processes wait for each other for ever.
    """
    settings = {key: value for key, value in asdict(config).items() if key not in OWN}
    first, *others = processes.from_all(dict(_flat(settings)))
    for rank, theirs in enumerate(others, 1):
        differing = [key for key in first | theirs if first.get(key) != theirs.get(key)]
        if differing:
            # of the name last: by default it is made of others
            key = min(differing, key="name".__eq__)
            more = f", and {len(differing) - 1} more differ" if len(differing) > 1 else ""
            raise ValueError(
                f"{key} is {first.get(key)} on rank 0 and {theirs.get(key)} on rank {rank}{more}: start "
                "every process with the same command and the same conf/"
            )


def _flat(settings: dict, group: str = "") -> Iterator[tuple[str, object]]:
    """Every value by its key, such as optim.learning_rate."""
    for key, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{group}{key}.")
        else:
            yield group + key, value
