"""Shape of the trained model and stages of its training."""

from dataclasses import dataclass
from typing import Any

from make_tiny_dsa import TinyDsa, make_config

from tiny_dsa.data import VOCABULARY_SIZE
from tiny_dsa.model import DENSE, SPARSE, WARM

SHAPE = TinyDsa(layers=4, leaders=2, index_topk=64, max_model_len=16384)
LEADERS = SHAPE.leader_layers
SEED = 0


def target_config() -> dict[str, Any]:
    """config.json of the trained model.

    The rotary base is small: the slowest pair turns once in 550 tokens. So all angles
    are met in short sequences, and nothing is new to the model in long ones.
    """
    return make_config(SHAPE) | {
        "vocab_size": VOCABULARY_SIZE,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    }


@dataclass(frozen=True, slots=True)
class Stage:
    """Equal training steps.

    Attributes:
        mode: of `DsaModel`: the attention, and whether the indexer is trained.
        length: tokens of a sequence.
        batch: sequences of a step.
        steps: how many.
        first_rate, last_rate: learning rate, linear in between.
    """

    mode: str
    length: int
    batch: int
    steps: int
    first_rate: float
    last_rate: float


MAIN_STAGE = 1  # where the model learns most of what it knows
STAGES = (
    Stage(DENSE, 256, 16, 30, 1e-4, 3e-3),
    Stage(DENSE, 256, 16, 370, 3e-3, 2.4e-3),
    Stage(WARM, 512, 8, 60, 2.4e-3, 2e-3),
    Stage(WARM, 1024, 4, 40, 2e-3, 1.6e-3),
    Stage(WARM, 2048, 2, 13, 1.6e-3, 1.4e-3),
    Stage(SPARSE, 1024, 4, 27, 1.2e-3, 4e-4),
    Stage(SPARSE, 2048, 2, 6, 4e-4, 2e-4),
    Stage(SPARSE, 4096, 1, 4, 2e-4, 5e-5),
)
