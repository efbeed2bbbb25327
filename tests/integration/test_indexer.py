import pytest
import torch

from vllm_dhisparse.integration import cpu_indexer
from vllm_dhisparse.integration.cpu_indexer import select_positions

SIZES = [(1, 1, 8), (9, 40, 8), (40, 300, 64)]


def case(num_queries, context, seed=0, levels=3):
    """Small integers, so that equal scores are common, negative and zero ones too."""
    generator = torch.Generator().manual_seed(seed)
    queries = torch.randint(-1, 2, (num_queries, 2, 4), generator=generator).float()
    keys = torch.randint(-1, 2, (context, 4), generator=generator).float()
    weights = torch.randint(-1, levels, (num_queries, 2), generator=generator).float()
    return queries, keys, weights


def by_hand(queries, keys, weights, positions, top_k):
    rows = []
    for query, weight, position in zip(queries, weights, positions.tolist(), strict=True):
        scores = (torch.relu(query @ keys.T) * weight[:, None]).sum(0).tolist()
        best = sorted(range(position + 1), key=lambda p: (-scores[p], p))[:top_k]
        rows.append(best + [-1] * (top_k - len(best)))
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize(
    ("num_queries", "context", "top_k"), [(1, 1, 8), (9, 40, 8), (40, 300, 64)]
)
def test_best_first_and_ties_by_lower_position(num_queries, context, top_k):
    positions = torch.arange(context - num_queries, context)
    arguments = (*case(num_queries, context), positions, top_k)
    assert torch.equal(select_positions(*arguments), by_hand(*arguments))


def test_rounds_do_not_change_the_selection(monkeypatch):
    arguments = (*case(30, 90), torch.arange(60, 90), 16)
    whole = select_positions(*arguments)
    monkeypatch.setattr(cpu_indexer, "_ROUND_SCORES", 400)
    assert torch.equal(whole, select_positions(*arguments))


def test_the_selection_does_not_depend_on_later_keys_or_other_queries():
    queries, keys, weights = case(8, 50)
    positions = torch.arange(20, 28)
    whole = select_positions(queries, keys, weights, positions, 16)
    for i in range(8):
        one = slice(i, i + 1)
        alone = select_positions(
            queries[one], keys[: positions[i] + 1], weights[one], positions[one], 16
        )
        assert torch.equal(alone, whole[one])


def test_minus_zero_ties_with_zero():
    queries = torch.tensor([[[1.0, 0, 0, 0], [0, 1.0, 0, 0]]])
    keys = torch.tensor([[-1.0, -1, 0, 0], [-1.0, -1, 0, 0], [1, 0, 0, 0]])
    weights = torch.tensor([[1.0, -1.0]])  # 0 * -1 is -0.0
    selected = select_positions(queries, keys, weights, torch.tensor([2]), 3)
    assert selected.tolist() == [[2, 0, 1]]
