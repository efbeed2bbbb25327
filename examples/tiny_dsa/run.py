"""What the trainings have in common: optimizer, state kept in a folder, and a log."""

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CHECKPOINT_SECONDS = 120


class Run:
    """A model in training, its optimizer and how far they are.

    Args:
        directory: of the run; made when missing. A run that was stopped is read from it.
        model: to be trained.

    Attributes:
        step: how many steps are done.
    """

    def __init__(self, directory: Path, model: nn.Module) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.model, self.optimizer = model, _make_optimizer(model)
        self.step = 0
        self._state, self._log = directory / "state.pt", directory / "log.jsonl"
        if self._state.exists():
            state = torch.load(self._state, weights_only=True)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
        _forget_lines_after(self._log, self.step)

    def until(self, last: int) -> Iterator[int]:
        """Yield the numbers of the steps to do; the state is saved now and then, and at the end."""
        saved = time.monotonic()
        while self.step < last:
            yield self.step
            self.step += 1
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                self.save()
                saved = time.monotonic()
        self.save()

    def update(self, loss: Tensor, rate: float) -> None:
        """Change the weights against the gradient of ``loss``, its norm at most 1."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def save(self) -> None:
        """Write the state; an interrupted write leaves the last one whole."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }
        part = self._state.with_suffix(".part")
        torch.save(state, part)
        part.replace(self._state)

    def log(self, step: int, entry: Mapping[str, Any]) -> None:
        """Print and keep what is known after ``step`` steps."""
        entry = {"step": step, "cpu_seconds": time.process_time(), **entry}
        line = json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in entry.items()})
        with self._log.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        print(line, flush=True)


def _forget_lines_after(log: Path, step: int) -> None:
    """Drop what a stopped run logged after its last checkpoint."""
    if log.exists():
        lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [line for line in lines if json.loads(line)["step"] <= step]
        log.write_text("".join(kept), encoding="utf-8")


def _make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms and biases do not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.02}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
