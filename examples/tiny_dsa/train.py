"""Train the target; a run that was stopped goes on where it was.

cd examples && python -m tiny_dsa.train DIRECTORY
"""

import argparse
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_dsa.checkpoint import write_target
from tiny_dsa.data import COPY, KINDS, RECALL, TEXT, Source, make_tokenizer, text_pieces
from tiny_dsa.initial import initialise
from tiny_dsa.model import DsaModel
from tiny_dsa.run import Run
from tiny_dsa.settings import LEADERS, MAIN_STAGE, SEED, STAGES, Stage, target_config

LOG_STEPS = 10
BALANCE_RATE = 2e-3


class Training:
    """The model and its training.

    Args:
        directory: of the run; made when missing.
        stages: what to train.
        seed: of weights and data.
        plain: start from random weights alone, without the circuit for recall.
    """

    def __init__(
        self, directory: Path, stages: tuple[Stage, ...], seed: int = SEED, plain: bool = False
    ) -> None:
        self.stages, self.seed = stages, seed
        self.model = DsaModel(target_config(), LEADERS)
        initialise(self.model, seed, plain)
        self.state = Run(directory, self.model)
        self.tokenizer = make_tokenizer()
        self.source = Source(self.tokenizer, text_pieces()[0], seed)
        self._sums: dict[str, list[float]] = defaultdict(list)

    def run(self) -> None:
        """Train to the end of the last stage."""
        for step in self.state.until(sum(stage.steps for stage in self.stages)):
            stage, rate = self._stage(step)
            self._train(step, stage, rate)
            if (step + 1) % LOG_STEPS == 0:
                means = {name: sum(each) / len(each) for name, each in self._sums.items()}
                self._sums.clear()
                now = {"mode": stage.mode, "length": stage.length, "rate": rate}
                self.state.log(step + 1, now | means)

    def _stage(self, step: int) -> tuple[Stage, float]:
        first = 0
        for stage in self.stages:
            if step < first + stage.steps:
                done = (step - first) / stage.steps
                return stage, stage.first_rate + done * (stage.last_rate - stage.first_rate)
            first += stage.steps
        raise ValueError(f"there is no step {step}")

    def _train(self, step: int, stage: Stage, rate: float) -> None:
        self.source.random.seed(f"{self.seed}/{step}")
        tokens, kinds = batch(self.source, stage.length + 1, stage.batch)
        result = self.model(tokens[:, :-1], stage.mode)
        logits = self.model.lm_head(self.model.norm(result.hidden[-1]))
        known = kinds[:, 1:] > 0
        wanted, kinds = tokens[:, 1:][known], kinds[:, 1:][known]
        losses = F.cross_entropy(logits[known], wanted, reduction="none")
        self.state.update(losses.mean() + sum(result.index_losses), rate)
        self._balance(result.expert_load)
        right = (logits[known].argmax(-1) == wanted).float()
        for kind in (TEXT, RECALL, COPY):
            of_kind = kinds == kind
            if of_kind.any():
                self._sums[f"{KINDS[kind]}_loss"].append(losses[of_kind].mean().item())
                self._sums[f"{KINDS[kind]}_right"].append(right[of_kind].mean().item())
        for leader, index_loss in zip(LEADERS, result.index_losses, strict=False):
            self._sums[f"index_loss_{leader}"].append(index_loss.item())

    def _balance(self, loads: dict[int, Tensor]) -> None:
        for layer, load in loads.items():
            bias = self.model.layers[layer].mlp.e_score_correction_bias
            bias += BALANCE_RATE * torch.sign(load.mean() - load)


def batch(source: Source, length: int, count: int) -> tuple[Tensor, Tensor]:
    """Tokens and kinds of training rows, int64 [count, length] each."""
    rows = [source.row(length) for _ in range(count)]
    tokens, kinds = ([getattr(row, name) for row in rows] for name in ("tokens", "kinds"))
    return torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(kinds))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--plain-weights", action="store_true", help="start without the circuit for recall"
    )
    parser.add_argument(
        "--dense-steps",
        type=int,
        default=STAGES[MAIN_STAGE].steps,
        help="steps of the stage that comes after the warm-up; default: %(default)s",
    )
    options = parser.parse_args()
    stages = list(STAGES)
    stages[MAIN_STAGE] = replace(stages[MAIN_STAGE], steps=options.dense_steps)
    training = Training(options.directory, tuple(stages), plain=options.plain_weights)
    training.run()
    write_target(training.model, training.tokenizer, options.directory / "checkpoint")


if __name__ == "__main__":
    main()
