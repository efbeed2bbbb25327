"""The rules find what no graph can hold, and nothing else."""

import pytest
import torch
from graph_rules import GraphRules

ONES = torch.ones(3, dtype=torch.int64)
MASK = ONES > 0
HELD = {
    "arithmetic": lambda: (ONES + 1).clamp(min=2)[ONES],
    "a part": lambda: torch.zeros(3)[1:].copy_(ONES[:2]),
    "where": lambda: torch.where(MASK, ONES, 0).sum(),
    "memory": lambda: torch.empty(5).zero_(),
}
NOT_HELD = {
    "int": lambda: int(ONES[0]),
    "if": lambda: 1 if MASK[0] else 0,
    "item": lambda: ONES[0].item(),
    "tolist": lambda: ONES.tolist(),
    "nonzero": lambda: MASK.nonzero(),
    "unique": lambda: torch.unique(ONES),
    "by a mask": lambda: ONES[MASK],
    "write by a mask": lambda: ONES.clone().__setitem__(MASK, 1),
    "by a list": lambda: ONES[[0, 2]],
    "repeat": lambda: torch.repeat_interleave(ONES, ONES),
    "host data": lambda: torch.tensor([1, 2]),
    "numpy": lambda: ONES.numpy(),
    "equal": lambda: torch.equal(ONES, ONES),
}


@pytest.mark.parametrize("name", HELD)
def test_what_a_graph_holds(name):
    with GraphRules() as rules:
        HELD[name]()
    assert rules.calls


@pytest.mark.parametrize("name", NOT_HELD)
def test_what_it_cannot_hold(name):
    with GraphRules(), pytest.raises(AssertionError, match=r"device|host data|values"):
        NOT_HELD[name]()
