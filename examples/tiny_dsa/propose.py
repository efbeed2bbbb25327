"""What the drafters' heads propose, and what they are trained on."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tiny_dsa.drafter import DRAFTS, Drafter

# Later drafts count only when all before them were right.
POSITION_WEIGHTS = 0.85 ** torch.arange(DRAFTS)


def losses(drafter: Drafter, hidden: Tensor, anchors: Tensor, wanted: Tensor) -> Tensor:
    """The loss of a batch of blocks, without DSpark's confidence head.

    Args:
        drafter: whose heads are used.
        hidden: of the rows that draft, float [blocks, DRAFTS, hidden].
        anchors: token before the first draft, int64 [blocks].
        wanted: tokens that the target generates, int64 [blocks, DRAFTS].
    """
    base = drafter.target[0].lm_head(hidden)
    previous = torch.cat((anchors[:, None], wanted[:, :-1]), dim=1)
    if drafter.method == "dspark":
        embedded = drafter.markov_head["markov_w1"](previous)
        logits = base + drafter.markov_head["markov_w2"](embedded)
        return _weighted(logits, wanted)
    candidates = base.topk(drafter.config["dflash_config"]["selector_top_k"], dim=-1)
    scores = _edges(drafter, candidates.indices, candidates.values, hidden, previous)
    hits = candidates.indices == wanted.unsqueeze(-1)
    known = hits.any(-1)
    chosen = (
        F.cross_entropy(scores[known], hits[known].float().argmax(-1), reduction="none")
        * POSITION_WEIGHTS.expand(known.shape)[known]
    )
    return _weighted(base, wanted) + chosen.sum() / max(1, known.sum())


def confidence_logits(drafter: Drafter, hidden: Tensor, previous: Tensor) -> Tensor:
    """How sure DSpark is of each draft, if the tokens ``previous`` before them are accepted.

    Args:
        drafter: of method ``dspark``.
        hidden: as in `losses`.
        previous: int64 [blocks, DRAFTS].

    Returns:
        float [blocks, DRAFTS]; its sigmoid is a probability.
    """
    embedded = drafter.markov_head["markov_w1"](previous)
    return drafter.confidence_head["proj"](torch.cat((hidden, embedded), dim=-1)).squeeze(-1)


@torch.no_grad()
def propose(drafter: Drafter, hidden: Tensor, anchors: Tensor) -> Tensor:
    """Greedy drafts int64 [blocks, DRAFTS]; arguments as in `losses`."""
    base = drafter.target[0].lm_head(hidden)
    previous, drafts = anchors, []
    if drafter.method == "dflash2":
        candidates = base.topk(drafter.config["dflash_config"]["selector_top_k"], dim=-1)
    for step in range(DRAFTS):
        if drafter.method == "dspark":
            embedded = drafter.markov_head["markov_w1"](previous)
            logits = base[:, step] + drafter.markov_head["markov_w2"](embedded)
            previous = logits.argmax(-1)
        else:
            ids = candidates.indices[:, step : step + 1]
            values = candidates.values[:, step : step + 1]
            scores = _edges(
                drafter, ids, values, hidden[:, step : step + 1], previous.unsqueeze(-1)
            )
            previous = ids[:, 0].gather(-1, scores[:, 0].argmax(-1, keepdim=True)).squeeze(-1)
        drafts.append(previous)
    return torch.stack(drafts, dim=1)


def _weighted(logits: Tensor, wanted: Tensor) -> Tensor:
    each = F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none")
    return (each.view(wanted.shape) * POSITION_WEIGHTS).mean()


def _edges(
    drafter: Drafter, candidates: Tensor, unary: Tensor, hidden: Tensor, previous: Tensor
) -> Tensor:
    """Scores of candidates [blocks, drafts, top_k] after the tokens ``previous``."""
    selector = drafter.candidate_selector
    gate = selector.predecessor_codebook[previous] * selector.hidden_projection(hidden)
    return unary + (selector.successor_codebook[candidates] @ gate.unsqueeze(-1)).squeeze(-1)
