"""What is wrong with KEY=VALUE on the command line: one line that names the key and the change to make."""

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import get_args

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)
from yaml import YAMLError

CONF = Path(__file__).resolve().parent.parent / "conf"
# exit code of every command whose input is refused
EXIT_REFUSED = 2
# exit code of a command that Ctrl-C has ended, as shells report it
EXIT_CTRL_C = 130
EXPERIMENT_FILE = (
    "in conf/experiment/ the first line of a file is `# @package _global_`, and its defaults list changes a "
    "group by `- override /model: NAME`"
)
# matches the texts in a value, a list or a sweep, in Hydra's syntax
TEXT = re.compile(r"""(?P<quote>["'])(?:\\.|(?!(?P=quote)).)*(?P=quote)|[^\[\](),"']+""")


def compose_conf(overrides: list[str]) -> DictConfig:
    """conf/config.yaml with these overrides. Raises what `explain` explains for those that Hydra refuses."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides)


def checked(given: DictConfig, schema: type):
    """The values as an object of the dataclass `schema`. Raises ValueError for unknown keys, wrong types."""
    for field in fields(schema):
        if not is_dataclass(field.type) or field.name not in given:
            continue
        if not isinstance(value := given[field.name], DictConfig):
            raise ValueError(
                f"{field.name} must be a group of keys with values, got {value}: change one of them, such as "
                f"{field.name}.{fields(field.type)[0].name}, leave it out, or correct its file"
            )
    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), given))
    except ConfigKeyError as error:
        raise ValueError(unknown_key(error.full_key, schema)) from error
    except OmegaConfBaseException as error:
        raise ValueError(wrong_value(error, given)) from error


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError, naming the key `name`, unless its value is one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def at_least(name: str, value: float, least: int) -> None:
    """Raises ValueError, naming the key `name`, for a value below `least`."""
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def explain(error: Exception, schema: type, *, sweeps: bool = True) -> str:
    """What Hydra, or YAML in conf/, found wrong.

    schema: the dataclass of the whole configuration. sweeps: whether the command takes --multirun.
    """
    if isinstance(error, OverrideParseException):
        return (
            f"{error.override!r} cannot be read: write KEY=VALUE, and quote brackets, commas, ~, accents and "
            "the like in texts, as in 'sample.prompt=\"def f(x):\"'"
        )
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        # Hydra names the choices of a group, with those of --config-dir, but no whole configurations
        choices = error.options or sorted(path.stem for path in CONF.glob("*.yaml"))
        near = get_close_matches(choice, choices, 1)
        given = f"{group}={choice}" if group else f"--config-name={choice}"
        if "/" in group:
            return f"{given} is no choice: {EXPERIMENT_FILE}"
        return f"{given} is no choice{_guess(near, ':')} there are {', '.join(choices)}"
    if isinstance(error.__cause__, ConfigKeyError | ConfigAttributeError):
        return unknown_key(error.__cause__.full_key, schema)
    if isinstance(error, YAMLError):
        return wrong_yaml(error)
    if isinstance(error, UnicodeDecodeError):
        # Hydra does not say which file it read
        line = error.object[: error.end].splitlines()[-1].decode(errors="backslashreplace")
        return f"a file in conf/ or in --config-dir is not UTF-8, at '{line}': save it in that encoding"
    reason = " ".join(str(error).split())
    if again := re.match(r"Multiple values for (\S+)\. |(\S+) appears more than once in the final", reason):
        key = again[1] or again[2]
        return (
            f"{key} is chosen twice: write {key}=NAME without +, and in the defaults list of a file "
            f"`- override /{key}: NAME`"
        )
    if several := re.match(r"Ambiguous value for argument '(.*)' 1\. ", reason):
        way = "add --multirun for a run with each" if sweeps else "give one"
        return (
            f"{several[1]} has several values: {way}, or put brackets around a list, and quotes that the "
            "shell leaves around a text, as in 'sample.prompt=\"a, b\"'"
        )
    if reason.startswith("In '"):
        return f"{reason.rstrip('.?')}: {EXPERIMENT_FILE}"
    return reason


def known_keys(schema: type) -> set[str]:
    """The groups of conf/, and every key of the configuration, such as optim.learning_rate."""
    return {path.name for path in CONF.iterdir() if path.is_dir()} | {name for name, _ in _fields(schema)}


def unknown_key(key: str, schema: type) -> str:
    """Why a key that conf/ does not have is refused, with similar keys."""
    known = known_keys(schema)
    if key == "experiment":
        return (
            "experiment holds no values of its own: choose one by experiment=NAME, and begin its file with "
            "the line `# @package _global_`"
        )
    if key in ("attention.patterns", "attention.block_size"):
        # written with +, it would be refused once more
        return (
            f"{key} has no value in the attention that is chosen, as in sdpa, which computes every block: "
            "add attention=reference, or attention=flash on a GPU"
        )
    if key in known:
        return f"{key} has no value in conf/ to change: write +{key}=VALUE to add one"
    # learning_rate and lr, with and without their group
    spelled: dict[str, list[str]] = {}
    shortened: dict[str, list[str]] = {}
    for name in sorted(known):
        group, dot, last = name.rpartition(".")
        initials = "".join(word[:1] for word in last.split("_"))
        for forms, form in ((spelled, last), (shortened, initials)):
            for given in {form, group + dot + form}:
                forms.setdefault(given, []).append(name)
    for word in (key, key.rpartition(".")[2]):
        near = spelled.get(word) or shortened.get(word)
        near = near or [name for form in get_close_matches(word, spelled, 2, 0.75) for name in spelled[form]]
        if near:
            break
    return f"{key} is no key{_guess(near, ': python -m train --help lists them')}"


def refuse_idle_overrides(words: list[str], config, positions: int = 0) -> None:
    """Raises ValueError for KEY=VALUE that another setting leaves without effect.

    config: the train.config.Config that the words have made. positions: that the weights of start.weights
    have room for, 0 if that is unknown.
    """
    weights, optim = config.start.weights, config.optim
    # prefix of keys that nothing reads: the setting that switches them off, and the change to make
    idle = {}
    if weights is None:
        idle["start."] = "start.weights=null: add start.weights=FOLDER, or use model.rotary"
    elif config.start.rotary_base is None and positions >= max(config.seq_len, config.pose_seq_len or 0):
        idle["start.positions"] = f"seq_len={config.seq_len}, for which the weights have room: raise it"
    if config.lora.rank == 0:
        idle["lora."] = "lora.rank=0: add lora.rank=16"
    if config.spikes.action == "ignore":
        idle["spikes."] = "spikes.action=ignore: add spikes.action=skip"
    if optim.schedule != "wsd":
        idle["optim.decay_fraction"] = f"optim.schedule={optim.schedule}: add optim.schedule=wsd"
    elif optim.decay_fraction == 0.0:
        idle["optim.final_learning_rate_ratio"] = "optim.decay_fraction=0: add optim.decay_fraction=0.2"
    if not config.attention.sparse:
        idle["attention.block_size"] = "dense layers alone: add attention=strided"
    if optim.algorithm != "muon":
        idle["optim.momentum"] = f"optim.algorithm={optim.algorithm}: add optim=muon"
    for word in words:
        key = key_of(word)
        is_of_model = key == "model" or (key.startswith("model.") and key != "model.dropout")
        if weights is not None and is_of_model:
            raise ValueError(
                f"{word} has no effect with start.weights={weights}, whose model is taken: leave it out"
            )
        for begin, reason in idle.items():
            if key.startswith(begin) and key != key_of(reason):
                raise ValueError(f"{word} has no effect with {reason}, or leave it out")


def refuse_misread(words: list[str], schema: type) -> None:
    """Raises ValueError for what Hydra would read otherwise than it is meant.

    words: as they were typed. schema: the dataclass of the whole configuration.
    """
    refuse_no_choice(words)
    refuse_second_choice(words)
    refuse_numbers_for_texts(words, schema)


def refuse_numbers_for_texts(words: list[str], schema: type) -> None:
    """Raises ValueError for KEY=VALUE whose text Hydra would rewrite as a number: 1e-3 as 0.001."""
    texts = {key for key, kind in _fields(schema) if _holds_text(kind)}
    parser = OverridesParser.create()
    for word in words:
        key, _, value = word.partition("=")
        if key_of(word) not in texts:
            continue
        for text in TEXT.finditer(value):
            typed = text[0].strip()
            # skip what is already in quotes
            if text["quote"] or not typed:
                continue
            # at a character outside its grammar, such as ~ or an accented letter, the parser's error does not
            # name the key: Hydra, which reads the word next, says more
            with suppress(HydraException):
                read = parser.parse_override(f"{key}={typed}").value()
                if isinstance(read, int | float) and str(read) != typed:
                    meant = f'{key}={value[: text.start()]}"{typed}"{value[text.end() :]}'
                    raise ValueError(
                        f"{word} would be read as {read}: put quotes that the shell leaves around {typed}, "
                        f"as in {shlex.quote(meant)}"
                    )


def refuse_no_choice(words: list[str]) -> None:
    """Raises ValueError for GROUP=VALUE, as typed, whose value, null or a number, is the name of no file."""
    parser = OverridesParser.create()
    for word in words:
        group, _, value = word.partition("=")
        if not value or not (CONF / group).is_dir():
            continue
        # what cannot be read is Hydra's to tell
        with suppress(HydraException):
            if isinstance(parser.parse_override(word).value(), int | float | None):
                choices = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
                raise ValueError(f"{word} is no choice: there are {', '.join(choices)}, or leave it out")


def refuse_second_choice(words: list[str]) -> None:
    """Raises ValueError for a group that is chosen twice: of the first choice nothing would be left."""
    chosen = {}
    for word in words:
        group = word.partition("=")[0]
        if "=" in word and (CONF / group).is_dir():
            if group in chosen:
                both = f", or {group}=[A,B], where the values of B count" if group == "experiment" else ""
                raise ValueError(f"{chosen[group]} and {word}: give one of them{both}")
            chosen[group] = word


def refuse_equal_names(words: list[str]) -> None:
    """Raises ValueError, before the first run, if two runs of --multirun would have one name.

    words: as they were typed. A name with a resolver, as ${now:%S}, is not known before its run.
    """
    given = get_args_parser().parse_args(words)
    # with --config-path the values are not in conf/
    if not given.multirun or given.config_path:
        return
    own = [f'hydra.searchpath=["file://{os.path.abspath(given.config_dir)}"]'] if given.config_dir else []
    names = Counter()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        [runs] = BasicSweeper.split_arguments(parser.parse_overrides(given.overrides), None)
        for run in runs:
            config = compose(given.config_name or "config", own + run)
            if ":" not in str(OmegaConf.to_container(config).get("name")):
                # one that does not resolve is refused by its run
                names[OmegaConf.select(config, "name", throw_on_resolution_failure=False)] += 1
    for name, count in names.items():
        if name is not None and count > 1:
            raise ValueError(
                f"name={name} would be that of {count} runs of this --multirun, and each would go on from "
                "the end of the one before: give each a name of its own, as 'name=seed${seed}' does"
            )


def wrong_value(error: OmegaConfBaseException, given: DictConfig) -> str:
    """Why a value of another type than its key's is refused; given: the configuration that holds it."""
    key, reason = error.full_key or "configuration", str(error.msg or error).splitlines()[0]
    if isinstance(error, InterpolationToMissingValueError):
        # the name is made of values that a file may lack
        key = reason.rpartition(" ")[2]
    if isinstance(error, MissingMandatoryValue | InterpolationToMissingValueError):
        return f"{key} must be given, as {key}=VALUE"
    if "is not Optional" in reason or "Incompatible value 'None'" in reason:
        return f"{key} must not be null: give it a value, or leave it out"
    if "is not a ListConfig" in reason and isinstance(error.full_key, int):
        # OmegaConf tells the item, not the key
        values = OmegaConf.to_container(given).items()
        keys = " or ".join(key for key, value in values if isinstance(value, list))
        return f"item {error.full_key} of {keys} must be a list: write lists of a list as [[1,2],[3,4]]"
    if "is not a ListConfig" in reason:
        return f"{key} must be a list: write '{key}=[{OmegaConf.select(given, key)}]'"
    if "could not be converted to Integer" in reason:
        # 1e6 is a float to Hydra and YAML
        return f"{key}: {reason}: write a whole number, without point or exponent, as 1_000_000"
    return f"{key}: {reason}"


def wrong_yaml(error: YAMLError) -> str:
    """Where a file, or a value on the command line, is no YAML, and the change to make."""
    reason = " ".join(str(error).split())
    # PyYAML's name for text that is of no file
    is_typed = "<unicode string>" in reason
    way_out = "lists are YAML: quote items that contain brackets" if is_typed else "correct it there"
    return f"{reason}: {way_out}"


def key_of(word: str) -> str:
    """The key that KEY=VALUE changes, +KEY=VALUE adds or ~KEY removes."""
    return word.lstrip("+~").partition("=")[0]


def _fields(schema: type, group: str = "") -> Iterator[tuple[str, type]]:
    """Every key of a dataclass and of the dataclasses in it, such as optim.learning_rate, and its type."""
    for field in fields(schema):
        yield group + field.name, field.type
        for kind in (field.type, *get_args(field.type)):
            if is_dataclass(kind):
                yield from _fields(kind, f"{group}{field.name}.")


def _holds_text(kind: type) -> bool:
    """Whether a type is str, or one of str: list[str], str | None."""
    return kind is str or any(_holds_text(part) for part in get_args(kind))


def _guess(near: list[str], otherwise: str) -> str:
    return f"; did you mean {' or '.join(dict.fromkeys(near))}?" if near else otherwise
