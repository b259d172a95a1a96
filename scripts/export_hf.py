"""Writes a trained model as a Hugging Face folder: python -m scripts.export_hf model=runs/NAME out=FOLDER

transformers loads it with AutoModelForCausalLM.from_pretrained(FOLDER). The tokenizer's files are copied too,
if the run's tokenizer is a folder.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from data.tokenizer import TOKENIZERS
from scripts.arguments import argument, check_place, run_script
from scripts.inference import find_model, model_tokenizer
from train.config import PRECISIONS
from train.export import export
from train.overrides import one_of
from train.step import DTYPES
from train.weights import load_model, run_attention

# what to print for the tokenizers that are known by name and have no files
WITHOUT_FILES = {
    "gpt2": "its tokens are GPT-2's, which AutoTokenizer.from_pretrained('gpt2') loads",
    "bytes": "its tokens are a text's bytes in UTF-8, and 256 is the end of a text",
}


@dataclass
class Arguments:
    model: str = argument(..., "a run's folder or a checkpoint", path=True)
    out: str = argument(..., "the folder to write, new or empty", path=True)
    tokenizer: str = argument(
        "", "gpt2, bytes or a folder with tokenizer.json; empty: the model's own", path=True
    )
    precision: str = argument("fp32", f"of the weights: {', '.join(PRECISIONS)}")


def main(arguments: Arguments) -> None:
    one_of("precision", arguments.precision, PRECISIONS)
    check_out(arguments.out)
    place = find_model("model", arguments.model)
    tokenizer = model_tokenizer(f"model={arguments.model}", place, arguments.tokenizer)
    model = load_model(place, run_attention(place, "reference", "cpu"))
    export(model, tokenizer, Path(arguments.out), DTYPES[arguments.precision], start=str(place))
    print(f"{arguments.out}: {model.n_parameters():,} parameters, {arguments.precision}")
    if tokenizer in TOKENIZERS:
        print(f"without a tokenizer: {WITHOUT_FILES[tokenizer]}")


def check_out(name: str) -> None:
    """Raises ValueError if no new folder of that name can be written."""
    out = Path(name)
    is_taken = any(out.iterdir()) if out.is_dir() else os.path.lexists(out)
    if not name or is_taken:
        raise ValueError(f"out must be a new or empty folder, got {name!r}: nothing is overwritten")
    check_place("out", name)


if __name__ == "__main__":
    run_script(main, Arguments, __doc__)
