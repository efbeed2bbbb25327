"""Train a drafter for a trained target; a run that was stopped goes on where it was.

cd examples && python -m tiny_dsa.train_drafter TARGET_DIRECTORY RUN_DIRECTORY --method dspark
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from tiny_dsa.acceptance import HELD_BACK, judge, proposed, verify
from tiny_dsa.checkpoint import read_target, write_drafter
from tiny_dsa.corpus import GENERATED, PROMPT, Corpus, generate
from tiny_dsa.data import Source, text_pieces
from tiny_dsa.drafter import DRAFTS, METHODS, Drafter
from tiny_dsa.model import DsaModel
from tiny_dsa.propose import confidence_logits, losses
from tiny_dsa.run import Run
from tiny_dsa.settings import SEED

# Drafts that the confidence head learns from must not be learned by heart.
SEQUENCES = {"train": 2048, "confidence": 256, "held": HELD_BACK}
STEPS = 2400
BATCH, BLOCKS = 16, 16
RATE = 2e-3
WARM_UP = 50
LOG_STEPS, MEASURED_STEPS = 50, 300


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
        torch.manual_seed(SEED)
        self.corpora = corpora
        self.drafter = Drafter(method, target)
        self.state = Run(directory, self.drafter)

    def run(self, steps: int = STEPS) -> None:
        """Train to the given step."""
        for step in self.state.until(steps):
            loss = self._train(step, steps)
            done, is_last = step + 1, step + 1 == steps
            if done % LOG_STEPS == 0 or is_last:
                entry: dict[str, Any] = {"loss": loss}
                if done % MEASURED_STEPS == 0 or is_last:
                    entry |= verify(self.drafter, self.corpora["held"]).summary()
                self.state.log(done, entry)

    def _train(self, step: int, steps: int) -> float:
        generator = torch.Generator().manual_seed(SEED * 1_000_003 + step)
        corpus = self.corpora["train"]
        rows = torch.randint(len(corpus), (BATCH,), generator=generator)
        last = PROMPT + GENERATED - DRAFTS
        anchors = torch.randint(PROMPT, last, (BATCH, BLOCKS), generator=generator)
        loss = block_loss(self.drafter, corpus.features[rows], corpus.tokens[rows], anchors)
        self.state.update(loss, RATE * min(1, (step + 1) / WARM_UP) * (1 - step / steps))
        return loss.item()


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


def fit_confidence(drafter: Drafter, corpus: Corpus) -> None:
    """Fit DSpark's confidence head, as it stands, to the drafts accepted in a corpus.

    Args:
        drafter: of method ``dspark``, trained on another corpus.
        corpus: to draft for. Only drafts count whose predecessors were all accepted.
    """
    hidden, previous, right = [], [], []
    for number in range(len(corpus)):
        found = proposed(drafter, corpus, number)
        judged, accepted = judge(found.accepted)
        hidden.append(found.hidden[judged])
        previous.append(found.previous[judged])
        right.append(accepted[judged].float())
    seen, before, wanted = torch.cat(hidden), torch.cat(previous), torch.cat(right)
    head = drafter.confidence_head["proj"]
    for weight in head.parameters():
        nn.init.zeros_(weight)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = confidence_logits(drafter, seen, before)
        total = F.binary_cross_entropy_with_logits(logits, wanted)
        total.backward()
        return total

    optimizer.step(loss)


def make_corpora(target: DsaModel, tokenizer: Tokenizer, path: Path) -> dict[str, Corpus]:
    """What the target generates, kept in a file for the next run of the same target."""
    if path.exists():
        return {k: Corpus(*v) for k, v in torch.load(path, weights_only=True).items()}
    corpora = {}
    taps = Drafter(METHODS[0], target).taps
    trained, held = text_pieces()
    for part, sequences in SEQUENCES.items():
        seed = SEED + (part == "confidence")
        source = Source(tokenizer, held if part == "held" else trained, seed)
        corpora[part] = generate(target, source, sequences, taps, seed)
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
    if options.method == "dspark":
        fit_confidence(training.drafter, corpora["confidence"])
    write_drafter(training.drafter, options.directory / "checkpoint")


if __name__ == "__main__":
    main()
