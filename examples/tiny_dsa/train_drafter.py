"""Train a drafter for a trained target; a run that was stopped goes on where it was.

cd examples && python -m tiny_dsa.train_drafter TARGET_DIRECTORY RUN_DIRECTORY --method dspark
"""

import argparse
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from tokenizers import Tokenizer
from torch import Tensor

from tiny_dsa.checkpoint import read_target
from tiny_dsa.corpus import GENERATED, PROMPT, TASKS, Corpus, generate
from tiny_dsa.data import Source, text_pieces
from tiny_dsa.drafter import DRAFTS, METHODS, Drafter
from tiny_dsa.model import DsaModel
from tiny_dsa.propose import losses, propose
from tiny_dsa.train import CHECKPOINT_SECONDS, SEED, forget_lines_after, make_optimizer

SEQUENCES = {"train": 512, "held": 64}
STEPS = 1000
BATCH, BLOCKS = 16, 16
RATE = 2e-3
WARM_UP = 50
LOG_STEPS = 50


class DrafterTraining:
    """A drafter, its optimizer and how far they are.

    Args:
        target: the model to draft for.
        corpora: what it generated, by part: ``train`` and ``held``.
        directory: of the run; made when missing.
        method: one of ``METHODS``.
    """

    def __init__(
        self, target: DsaModel, corpora: Mapping[str, Corpus], directory: Path, method: str
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(SEED)
        self.directory, self.corpora = directory, corpora
        self.drafter = Drafter(method, target)
        self.optimizer = make_optimizer(self.drafter)
        self.step = 0
        if self._path.exists():
            state = torch.load(self._path, weights_only=True)
            self.drafter.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
        forget_lines_after(self.directory / "log.jsonl", self.step)

    def run(self, steps: int = STEPS) -> None:
        """Train to the given step."""
        saved = time.monotonic()
        while self.step < steps:
            loss = self._train(steps)
            self.step += 1
            if self.step % LOG_STEPS == 0 or self.step == steps:
                self._log(loss, measured=self.step % 300 == 0 or self.step == steps)
            if time.monotonic() - saved > CHECKPOINT_SECONDS:
                self.save()
                saved = time.monotonic()
        self.save()

    def save(self) -> None:
        """Write the checkpoint; an interrupted write leaves the last one whole."""
        state = {
            "model": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
        }
        part = self._path.with_suffix(".part")
        torch.save(state, part)
        part.replace(self._path)

    @property
    def _path(self) -> Path:
        return self.directory / "state.pt"

    def _train(self, steps: int) -> float:
        generator = torch.Generator().manual_seed(SEED * 1_000_003 + self.step)
        corpus = self.corpora["train"]
        rows = torch.randint(len(corpus), (BATCH,), generator=generator)
        last = PROMPT + GENERATED - DRAFTS
        anchors = torch.randint(PROMPT, last, (BATCH, BLOCKS), generator=generator)
        loss = block_loss(self.drafter, corpus.features[rows], corpus.tokens[rows], anchors)
        rate = RATE * min(1, (self.step + 1) / WARM_UP) * (1 - self.step / steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimizer.step()
        return loss.item()

    def _log(self, loss: float, measured: bool) -> None:
        entry: dict[str, Any] = {"step": self.step, "loss": round(loss, 4)}
        entry["cpu_seconds"] = round(time.process_time(), 1)
        if measured:
            entry |= accepted_lengths(self.drafter, self.corpora["held"])
        with (self.directory / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        print(json.dumps(entry), flush=True)


def block_loss(drafter: Drafter, features: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
    """Loss of blocks at ``anchors`` [batch, blocks] in sequences [batch, tokens]."""
    hidden = drafter(features, anchors, tokens.gather(1, anchors))
    places = anchors.unsqueeze(-1) + torch.arange(1, DRAFTS + 1)
    wanted = tokens.gather(1, places.flatten(1)).view(places.shape)
    return losses(
        drafter,
        hidden.flatten(0, 1),
        tokens.gather(1, anchors).flatten(),
        wanted.flatten(0, 1),
    )


@torch.no_grad()
def accepted_lengths(drafter: Drafter, corpus: Corpus) -> dict[str, float]:
    """Mean tokens of a verification step by task: accepted drafts and the bonus token.

    Each sequence is walked as greedy speculation walks it: a step accepts the drafts up to
    the first that the target would not generate, then the target adds a token of its own.
    """
    anchors = torch.arange(PROMPT, PROMPT + GENERATED - DRAFTS)
    steps, gained = [0] * len(TASKS), [0] * len(TASKS)
    for number in range(len(corpus)):
        tokens = corpus.tokens[number]
        hidden = drafter(corpus.features[number, None], anchors[None], tokens[anchors][None])
        drafts = propose(drafter, hidden[0], tokens[anchors])
        wanted = tokens[anchors.unsqueeze(-1) + torch.arange(1, DRAFTS + 1)]
        accepted = (drafts == wanted).long().cumprod(-1).sum(-1)
        task, place = int(corpus.tasks[number]), 0
        while place < len(anchors):
            steps[task] += 1
            gained[task] += int(accepted[place]) + 1
            place += int(accepted[place]) + 1
    result = {f"accepted_{t}": gained[i] / max(1, steps[i]) for i, t in enumerate(TASKS)}
    return result | {"accepted": sum(gained) / sum(steps)}


def write_drafter(drafter: Drafter, directory: Path) -> None:
    """Write config and weights (float32) in the form that vLLM loads."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(drafter.config, indent=2) + "\n"
    (directory / "config.json").write_text(text, encoding="utf-8")
    weights = {name: tensor.contiguous() for name, tensor in drafter.state_dict().items()}
    (directory / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))


def read_drafter(method: str, target: DsaModel, directory: Path) -> Drafter:
    """The drafter of a folder that `write_drafter` wrote."""
    drafter = Drafter(method, target)
    drafter.load_state_dict(load_file(directory / "model.safetensors"))
    return drafter.eval()


def make_corpora(target: DsaModel, tokenizer: Tokenizer, path: Path) -> dict[str, Corpus]:
    """What the target generates, kept in a file for the next run of the same target."""
    if path.exists():
        return {k: Corpus(*v) for k, v in torch.load(path, weights_only=True).items()}
    corpora = {}
    taps = Drafter(METHODS[0], target).taps
    for part, pieces in zip(SEQUENCES, text_pieces(), strict=True):
        source = Source(tokenizer, pieces, SEED)
        corpora[part] = generate(target, source, SEQUENCES[part], taps, SEED)
        print(f"generated {part}", flush=True)
    torch.save({k: (c.tokens, c.features, c.tasks) for k, c in corpora.items()}, path)
    return corpora


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    options = parser.parse_args()
    target = read_target(options.target).requires_grad_(False)
    tokenizer = Tokenizer.from_file(str(options.target / "tokenizer.json"))
    options.directory.mkdir(parents=True, exist_ok=True)
    corpora = make_corpora(target, tokenizer, options.directory.parent / "corpora.pt")
    training = DrafterTraining(target, corpora, options.directory, options.method)
    training.run(options.steps)
    write_drafter(training.drafter, options.directory / "checkpoint")


if __name__ == "__main__":
    main()
