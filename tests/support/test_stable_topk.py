import pytest
import torch
from stable_topk import StableTopk
from torch import nn

MASKED = torch.finfo(torch.float32).min


class Indexer(nn.Module):
    """Ranks given scores [tokens, context]; ``variant`` says what it does wrong."""

    def __init__(self, variant="right"):
        super().__init__()
        self.variant = variant

    def forward(self, scores, top_k):
        tokens, context = scores.shape
        if self.variant != "unmasked":
            future = torch.ones(tokens, context).triu(context - tokens + 1).bool()
            scores = scores + torch.zeros(tokens, context).masked_fill(future, MASKED)
        scores = scores.unsqueeze(0)
        if self.variant == "sort":
            return scores.argsort(dim=-1, descending=True)[..., :top_k].int()
        if self.variant == "unsorted":
            return scores.topk(top_k, dim=-1, sorted=False).indices.int()
        if self.variant == "twice":
            scores.topk(top_k, dim=-1)
        positions = scores.topk(top_k, dim=-1).indices
        if self.variant == "reordered":
            positions = positions.flip(-1)
        return positions.to(torch.int32)


def test_of_equal_scores_the_lowest_positions_win():
    indexer = Indexer()
    selection = StableTopk(indexer)
    selection.record = []
    scores = torch.zeros(4, 6)
    scores[:, 3] = 1
    scores[:, 1] = -1
    returned = indexer(scores, 3)
    assert returned.dtype == torch.int32
    assert returned[0, -1].tolist() == [3, 0, 2]
    assert selection.record[0].positions.tolist() == [[0, 1, 2], [0, 2, 3], [0, 2, 3], [0, 2, 3]]


def test_positions_that_a_query_cannot_see_are_not_selected():
    indexer = Indexer()
    selection = StableTopk(indexer)
    selection.record = []
    indexer(torch.full((3, 3), -5.0), 3)
    assert selection.record[0].positions.tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2]]


def test_ties_do_not_depend_on_the_length_of_the_row():
    for context in (65, 257, 4099):
        indexer = Indexer()
        StableTopk(indexer)
        assert indexer(torch.zeros(1, context), 64)[0, 0].tolist() == list(range(64))


def test_the_margin_is_the_smallest_distance_that_is_no_tie():
    indexer = Indexer()
    selection = StableTopk(indexer)
    selection.record = []
    indexer(torch.tensor([[0, 4, 1, 9.0], [5, 5, 5, 5], [1, 2, 4, 7]])[:, :4], 2)
    indexer(torch.zeros(2, 2), 2)
    # The first row sees two positions and the second ties, so the third decides: 4 - 2.
    assert [s.margin for s in selection.record] == [2.0, float("inf")]


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("sort", "called topk 0 times"),
        ("twice", "called topk 2 times"),
        ("unsorted", "unknown arguments"),
        ("reordered", "does not return the positions"),
        ("unmasked", "not masked causally"),
    ],
)
def test_an_indexer_that_works_otherwise_is_refused(variant, message):
    indexer = Indexer(variant)
    StableTopk(indexer)
    with pytest.raises(RuntimeError, match=message):
        indexer(torch.arange(20.0).view(4, 5), 2)


def test_topk_outside_of_the_indexer_is_untouched():
    indexer = Indexer()
    selection = StableTopk(indexer)
    indexer(torch.zeros(2, 4), 2)
    torch.zeros(2, 4).topk(2, dim=-1)
    assert selection.calls == 1
