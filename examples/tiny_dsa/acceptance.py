"""How many drafts of a drafter the target accepts, and whether DSpark knows it beforehand.

cd examples && python -m tiny_dsa.acceptance TARGET_DIRECTORY DRAFTER_DIRECTORY --method dspark
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tiny_dsa.checkpoint import read_drafter, read_target
from tiny_dsa.corpus import GENERATED, PROMPT, TASKS, Corpus, generate
from tiny_dsa.data import Source, text_pieces
from tiny_dsa.drafter import DRAFTS, METHODS, Drafter
from tiny_dsa.propose import confidence_logits, propose
from tiny_dsa.settings import SEED

HELD_BACK = 64
RANGES = 5  # of confidence


@dataclass
class Verified:
    """The verification steps of greedy speculation.

    Attributes:
        tasks: index into ``TASKS``, int64 [steps].
        accepted: drafts accepted, int64 [steps].
        confidence: of DSpark's head that a draft is accepted if all before it are, float
            [steps, DRAFTS]; None for other methods.
    """

    tasks: Tensor
    accepted: Tensor
    confidence: Tensor | None

    def mean_accepted(self, task: str | None = None) -> float:
        """Mean accepted drafts of a step. The target adds a token of its own to each step."""
        chosen = self.accepted if task is None else self.accepted[self.tasks == TASKS.index(task)]
        return chosen.float().mean().item()

    def survival(self) -> list[float]:
        """Share of steps whose first 1, 2, .. DRAFTS drafts are all accepted."""
        return [(self.accepted > place).float().mean().item() for place in range(DRAFTS)]

    def summary(self) -> dict[str, Any]:
        """The figures of a log line."""
        names = {f"accepted_{task}": self.mean_accepted(task) for task in TASKS}
        return names | {"accepted": self.mean_accepted()}


@dataclass
class Reliability:
    """Groups of drafts: how confident the head was of them, and how many were accepted.

    Attributes:
        drafts: of each group, int64 [groups].
        said: mean confidence, float [groups]; nan for a group without drafts.
        found: share accepted, float [groups]; likewise.
    """

    drafts: Tensor
    said: Tensor
    found: Tensor

    def error(self) -> float:
        """Mean distance of ``said`` and ``found`` over all drafts.

        With groups by confidence, this is the expected calibration error.
        """
        distance = (self.said - self.found).abs().nan_to_num(0.0)
        return ((distance * self.drafts).sum() / self.drafts.sum()).item()

    def table(self) -> list[dict[str, float]]:
        """One line for each group that has drafts."""
        lines = zip(self.drafts.tolist(), self.said.tolist(), self.found.tolist(), strict=True)
        return [{"drafts": n, "said": said, "found": found} for n, said, found in lines if n]


@dataclass
class Proposed:
    """What a drafter proposes at every place of a continuation.

    Attributes:
        hidden: of the rows that draft, float [places, DRAFTS, hidden].
        previous: token before each draft, int64 [places, DRAFTS].
        accepted: drafts up to the first that the target would not generate, int64 [places].
    """

    hidden: Tensor
    previous: Tensor
    accepted: Tensor


@torch.no_grad()
def proposed(drafter: Drafter, corpus: Corpus, number: int) -> Proposed:
    """Draft after each generated token of sequence ``number``."""
    anchors = torch.arange(PROMPT, PROMPT + GENERATED - DRAFTS)
    tokens = corpus.tokens[number]
    hidden = drafter(corpus.features[number, None], anchors[None], tokens[anchors][None])[0]
    drafts = propose(drafter, hidden, tokens[anchors])
    wanted = tokens[anchors.unsqueeze(-1) + torch.arange(1, DRAFTS + 1)]
    accepted = (drafts == wanted).long().cumprod(-1).sum(-1)
    return Proposed(hidden, torch.cat((tokens[anchors, None], drafts[:, :-1]), dim=1), accepted)


@torch.no_grad()
def verify(drafter: Drafter, corpus: Corpus) -> Verified:
    """Walk each sequence as greedy speculation walks it.

    A step accepts the drafts up to the first that the target would not generate, then the
    target adds a token of its own.
    """
    tasks, accepted, confidence = [], [], []
    for number in range(len(corpus)):
        found = proposed(drafter, corpus, number)
        places = [0]
        while (place := places[-1] + int(found.accepted[places[-1]]) + 1) < len(found.accepted):
            places.append(place)
        tasks += [corpus.tasks[number]] * len(places)
        accepted.append(found.accepted[places])
        if drafter.method == "dspark":
            logits = confidence_logits(drafter, found.hidden[places], found.previous[places])
            confidence.append(logits.sigmoid())
    said = torch.cat(confidence) if confidence else None
    return Verified(torch.stack(tasks), torch.cat(accepted), said)


def judge(accepted: Tensor) -> tuple[Tensor, Tensor]:
    """Which drafts had all before them accepted, and which were accepted too.

    Args:
        accepted: drafts accepted, int64 [steps].

    Returns:
        bool [steps, DRAFTS] each.
    """
    places = torch.arange(DRAFTS)
    return accepted[:, None] >= places, accepted[:, None] > places


def reliability(confidence: Tensor, right: Tensor, judged: Tensor, groups: Tensor) -> Reliability:
    """Compare confidence and acceptance by group; all arguments of one shape.

    Args:
        confidence: 0 to 1.
        right: bool, whether a draft was accepted.
        judged: bool, which drafts count.
        groups: int64, the group of each.
    """
    groups = groups[judged]
    drafts = groups.bincount()
    said = groups.bincount(confidence[judged]) / drafts
    return Reliability(drafts, said, groups.bincount(right[judged].float()) / drafts)


def calibration(verified: Verified) -> dict[str, Any]:
    """What DSpark's confidence says of a draft, where all before it were accepted.

    Returns:
        by position and by range of confidence: drafts, mean confidence, share accepted; the
        expected calibration error; and by position the mean product of the confidences up to
        it, which predicts `Verified.survival`.

    Raises:
        ValueError: the drafter has no such head.
    """
    if verified.confidence is None:
        raise ValueError("only DSpark says how confident it is")
    judged, right = judge(verified.accepted)
    confidence = verified.confidence
    by_position = reliability(confidence, right, judged, torch.arange(DRAFTS).expand_as(right))
    ranges = (confidence * RANGES).long().clamp(max=RANGES - 1)
    by_confidence = reliability(confidence, right, judged, ranges)
    return {
        "by_position": by_position.table(),
        "by_confidence": by_confidence.table(),
        "expected_calibration_error": by_confidence.error(),
        "predicted_survival": confidence.cumprod(-1).mean(0).tolist(),
    }


def rounded(figures: Any) -> Any:
    """Figures with four decimals, whatever holds them."""
    if isinstance(figures, dict):
        return {name: rounded(each) for name, each in figures.items()}
    if isinstance(figures, list):
        return [rounded(each) for each in figures]
    return round(figures, 4) if isinstance(figures, float) else figures


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the figures go")
    options = parser.parse_args()
    target = read_target(options.target).requires_grad_(False)
    drafter = read_drafter(options.method, target, options.drafter)
    tokenizer = Tokenizer.from_file(str(options.target / "tokenizer.json"))
    held = Source(tokenizer, text_pieces()[1], SEED)
    verified = verify(drafter, generate(target, held, HELD_BACK, drafter.taps, SEED))
    result = verified.summary() | {"survival": verified.survival()}
    if verified.confidence is not None:
        result |= calibration(verified)
    text = json.dumps(rounded(result), indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
