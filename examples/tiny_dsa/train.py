"""Train the target; a run that was stopped goes on where its last checkpoint left it.

    cd examples && python -m tiny_dsa.train RUN_DIRECTORY

The folder gets ``state.pt`` (every two minutes and at the end), ``log.jsonl``, one line for
every ten steps, and at the end ``checkpoint``.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_dsa.checkpoint import write_target
from tiny_dsa.data import COPY, KINDS, RECALL, TEXT, Source, make_tokenizer, text_pieces
from tiny_dsa.initial import initialise
from tiny_dsa.model import DsaModel
from tiny_dsa.settings import LEADERS, STAGES, Stage, target_config

SEED = 0
CHECKPOINT_SECONDS = 120
LOG_STEPS = 10
BALANCE_RATE = 2e-3


class Training:
    """The model, its optimizer and how far they are.

    Args:
        directory: of the run; made when missing.
        stages: what to train.
        seed: of weights and data.
    """

    def __init__(self, directory: Path, stages: tuple[Stage, ...], seed: int = SEED) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.stages, self.seed = directory, stages, seed
        self.model = DsaModel(target_config(), LEADERS)
        initialise(self.model, seed)
        self.optimizer = make_optimizer(self.model)
        self.step = 0
        self.tokenizer = make_tokenizer()
        self.source = Source(self.tokenizer, text_pieces()[0], seed)
        self._sums: dict[str, list[float]] = defaultdict(list)
        if self._path.exists():
            state = torch.load(self._path, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
        forget_lines_after(self.directory / "log.jsonl", self.step)

    def run(self) -> None:
        """Train to the end of the last stage."""
        saved = time.monotonic()
        while (stage_and_rate := self._stage()) is not None:
            self._train(*stage_and_rate)
            self.step += 1
            if self.step % LOG_STEPS == 0:
                self._log(*stage_and_rate)
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                self.save()
                saved = time.monotonic()
        self.save()

    def save(self) -> None:
        """Write the checkpoint; an interrupted write leaves the last one whole."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }
        part = self._path.with_suffix(".part")
        torch.save(state, part)
        part.replace(self._path)

    @property
    def _path(self) -> Path:
        return self.directory / "state.pt"

    def _stage(self) -> tuple[Stage, float] | None:
        first = 0
        for stage in self.stages:
            if self.step < first + stage.steps:
                done = (self.step - first) / stage.steps
                return stage, stage.first_rate + done * (stage.last_rate - stage.first_rate)
            first += stage.steps
        return None

    def _train(self, stage: Stage, rate: float) -> None:
        self.source.random.seed(f"{self.seed}/{self.step}")
        tokens, kinds = batch(self.source, stage.length + 1, stage.batch)
        result = self.model(tokens[:, :-1], stage.mode)
        logits = self.model.lm_head(self.model.norm(result.hidden[-1]))
        known = kinds[:, 1:] > 0
        wanted, kinds = tokens[:, 1:][known], kinds[:, 1:][known]
        losses = F.cross_entropy(logits[known], wanted, reduction="none")
        loss = losses.mean() + sum(result.index_losses)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
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

    def _log(self, stage: Stage, rate: float) -> None:
        entry: dict[str, Any] = {"step": self.step, "mode": stage.mode, "length": stage.length}
        entry |= {"rate": rate, "cpu_seconds": time.process_time()}
        entry |= {name: sum(each) / len(each) for name, each in self._sums.items()}
        self._sums.clear()
        line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in entry.items()})
        with (self.directory / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)


def forget_lines_after(log: Path, step: int) -> None:
    """Drop what a stopped run logged after its last checkpoint."""
    if log.exists():
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        log.write_text("".join(kept), encoding="utf-8")


def batch(source: Source, length: int, count: int) -> tuple[Tensor, Tensor]:
    """Tokens and kinds of training rows, int64 [count, length] each."""
    rows = [source.row(length) for _ in range(count)]
    tokens, kinds = ([getattr(row, name) for row in rows] for name in ("tokens", "kinds"))
    return torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(kinds))


def make_optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms and biases do not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    training = Training(parser.parse_args().directory, STAGES)
    training.run()
    write_target(training.model, training.tokenizer, training.directory / "checkpoint")


if __name__ == "__main__":
    main()
