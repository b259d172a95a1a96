"""The models of conf/model that the benchmarks measure."""

from omegaconf import OmegaConf

from model import ModelConfig
from train.overrides import CONF

MODELS = CONF / "model"


def check_models(names: list[str]) -> None:
    """Raises ValueError for a name that conf/model does not have."""
    known = sorted(path.stem for path in MODELS.glob("*.yaml"))
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"models must be of {', '.join(known)}, got {', '.join(unknown)}")


def read_model(name: str, seq_len: int) -> ModelConfig:
    """The model of conf/model/NAME.yaml with room for seq_len tokens."""
    values = OmegaConf.load(MODELS / f"{name}.yaml")
    values.max_seq_len = seq_len
    return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(ModelConfig), values))
