"""The tie rule of this project inside transformers' indexers, without a change to their code."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Selection(NamedTuple):
    """What an indexer selected in one forward pass.

    Attributes:
        positions: ascending, padded with -1, int64 [tokens, top-k].
        margin: smallest positive distance of a query's last selected score to its first
            one not selected; infinite where every query selects all that it sees.
    """

    positions: Tensor
    margin: float


class StableTopk:
    """Makes one indexer break ties at the boundary of its top-k by position.

    While the indexer runs, its call of ``torch.Tensor.topk`` is answered by a stable
    descending sort: of equal scores the lowest position wins. Everything else is
    transformers' own code.

    Attributes:
        calls: number of forward passes so far.
        record: when a list, each pass appends its selection.

    Raises:
        RuntimeError: at a forward pass, when the indexer does not call ``topk`` exactly
            once on masked scores and return the positions found.
    """

    def __init__(self, indexer: nn.Module) -> None:
        self.calls = 0
        self.record: list[Selection] | None = None
        self._forward = indexer.forward
        indexer.forward = self._run  # type: ignore[method-assign]

    def _run(self, *args: Any, **kwargs: Any) -> Tensor:
        with _Answer() as answer:
            returned = self._forward(*args, **kwargs)
        self.calls += 1
        if len(answer.selected) != 1:
            raise RuntimeError(f"the indexer called topk {len(answer.selected)} times, not once")
        scores, selected = answer.scores, answer.selected[0]
        if not isinstance(returned, Tensor) or not torch.equal(returned.long(), selected):
            raise RuntimeError("the indexer does not return the positions that topk found")
        self._check_causal(scores)
        if self.record is not None:
            self.record.append(_selection(scores[0], selected[0]))
        return returned

    @staticmethod
    def _check_causal(scores: Tensor) -> None:
        tokens, context = scores.shape[-2:]
        position = torch.arange(context - tokens, context).unsqueeze(-1)
        masked = torch.arange(context) > position
        if not torch.equal(_is_masked(scores), masked.expand_as(scores)):
            raise RuntimeError("the scores that the indexer ranks are not masked causally")


class _Answer(TorchFunctionMode):
    """Answers ``topk`` over the last dimension by a stable sort and keeps what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.selected: list[Tensor] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.topk, torch.Tensor.topk):
            return func(*args, **kwargs)
        scores, top_k = args
        if kwargs != {"dim": -1}:
            raise RuntimeError(f"the indexer calls topk with unknown arguments {kwargs}")
        values, positions = scores.sort(dim=-1, descending=True, stable=True)
        self.scores = scores
        self.selected.append(positions[..., :top_k])
        return torch.return_types.topk((values[..., :top_k], self.selected[-1]))


def _is_masked(scores: Tensor) -> Tensor:
    # The mask is the lowest float, or minus infinity, added to the score.
    return scores <= torch.finfo(scores.dtype).min / 2


def _selection(scores: Tensor, selected: Tensor) -> Selection:
    context, top_k = scores.shape[-1], selected.shape[-1]
    hidden = _is_masked(scores).gather(-1, selected)
    ascending = selected.masked_fill(hidden, context).sort(dim=-1).values
    positions = ascending.masked_fill(ascending == context, -1)
    if top_k == context:
        return Selection(positions, math.inf)
    ranked = scores.sort(dim=-1, descending=True).values
    last, first_out = ranked[:, top_k - 1], ranked[:, top_k]
    distances = (last - first_out)[(last > first_out) & ~_is_masked(first_out)]
    return Selection(positions, distances.min().item() if len(distances) else math.inf)
