"""The tie rule of this project inside transformers' indexers, without a change to their code."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class StableTopk:
    """Makes one indexer break ties at the boundary of its top-k by position.

    While the indexer runs, its call of ``torch.Tensor.topk`` is answered by a stable
    descending sort: of equal scores the lowest position wins. Everything else is
    transformers' own code.

    Attributes:
        calls: number of forward passes so far.
        record: when a list, each pass appends its selection, ascending positions padded
            with -1, int64 [tokens, top-k].

    Raises:
        RuntimeError: at a forward pass, when the indexer does not call ``topk`` exactly
            once on masked scores and return the positions found.
    """

    def __init__(self, indexer: nn.Module) -> None:
        self.calls = 0
        self.record: list[Tensor] | None = None
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
            self.record.append(_visible(scores, selected)[0])
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


def _visible(scores: Tensor, selected: Tensor) -> Tensor:
    """Ascending positions; those that the causal mask hides, which rank last, are -1."""
    hidden = _is_masked(scores).gather(-1, selected)
    beyond = scores.shape[-1]
    ascending = selected.masked_fill(hidden, beyond).sort(dim=-1).values
    return ascending.masked_fill(ascending == beyond, -1)
