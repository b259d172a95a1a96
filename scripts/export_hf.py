"""Writes a trained model as a Hugging Face folder: python -m scripts.export_hf model=runs/NAME out=FOLDER

transformers loads it with AutoModelForCausalLM.from_pretrained(FOLDER). The tokenizer goes along if the run
read its text by that of a folder.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from model import AttentionConfig
from scripts.arguments import argument, run_script
from train.export import export
from train.weights import load_model, tokenizer_name

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Arguments:
    model: str = argument(..., "a run's folder or a checkpoint")
    out: str = argument(..., "the folder to write, new or empty")
    precision: str = argument("fp32", f"of the weights: {', '.join(DTYPES)}")


def main(arguments: Arguments) -> None:
    if arguments.precision not in DTYPES:
        raise ValueError(f"precision must be one of {', '.join(DTYPES)}, got {arguments.precision!r}")
    model = load_model(arguments.model, AttentionConfig(implementation="reference"))
    export(model, tokenizer_name(arguments.model), Path(arguments.out), DTYPES[arguments.precision])
    print(f"{arguments.out}: {model.n_parameters():,} parameters, {arguments.precision}")


if __name__ == "__main__":
    run_script(main, Arguments, __doc__)
