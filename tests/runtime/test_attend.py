import pytest
import torch
from planes import IMPLEMENTATIONS, plane


def make_case(num_tokens, num_heads, top_k, page_rows, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    slab = torch.randn(5, page_rows + 3, 24, generator=generator).to(dtype)
    rows = slab[:, :page_rows]  # pages with padding between them
    query = torch.randn(num_tokens, num_heads, 24, generator=generator).to(dtype)
    remap = torch.randint(-1, 5 * page_rows, (num_tokens, top_k), generator=generator)
    return query, rows, remap.to(torch.int32)


def by_hand(query, rows, remap, scale, value_size):
    out = torch.zeros(*query.shape[:2], value_size, dtype=torch.float64)
    for token in range(query.shape[0]):
        index = [i for i in remap[token].tolist() if i >= 0]
        if not index:
            continue
        picked = torch.stack([rows[i // rows.shape[1], i % rows.shape[1]] for i in index]).double()
        weights = torch.softmax(query[token].double() @ picked.T * scale, dim=-1)
        out[token] = weights @ picked[:, :value_size]
    return out


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "page_rows"), [(1, 1, 1), (7, 33, 16), (63, 5, 64)]
)
def test_attend_is_softmax_over_the_selected_rows(name, num_tokens, top_k, page_rows):
    case = make_case(num_tokens, 3, top_k, page_rows, torch.float32)
    out = plane(name).attend(*case, scale=0.3, value_size=16)
    torch.testing.assert_close(out.double(), by_hand(*case, 0.3, 16), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_attend_accepts_bfloat16(name):
    case = make_case(9, 4, 17, 8, torch.bfloat16)
    out = plane(name).attend(*case, scale=0.3, value_size=16)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), by_hand(*case, 0.3, 16), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_attend_of_no_row_is_zero_and_unused_places_may_hold_nan(name):
    query, rows, remap = make_case(4, 2, 6, 8, torch.float32)
    rows = rows.clone()
    remap[2] = -1
    remap[remap == 0] = 1
    rows[0, 0] = float("nan")  # the place that -1 is clamped to
    out = plane(name).attend(query, rows, remap, 0.3, 16)
    assert torch.equal(out[2], torch.zeros_like(out[2]))
    assert not out.isnan().any()


@pytest.mark.parametrize("name", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("top_k", [8, 70])
def test_a_query_has_the_same_bits_alone_and_wherever_its_rows_are(name, top_k):
    for dtype in (torch.float32, torch.bfloat16):
        query, rows, remap = make_case(9, 2, top_k, 8, dtype)
        whole = plane(name).attend(query, rows, remap, 0.3, 16)
        staged = rows.reshape(1, -1, 24).contiguous()
        assert torch.equal(whole, plane(name).attend(query, staged, remap, 0.3, 16))
        for token in (0, 5, 8):
            part = slice(token, token + 1)
            alone = plane(name).attend(query[part], rows, remap[part], 0.3, 16)
            assert torch.equal(whole[part], alone)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_attend_of_an_empty_batch(name):
    query, rows, remap = make_case(0, 2, 4, 8, torch.float32)
    assert plane(name).attend(query, rows, remap, 1.0, 16).shape == (0, 2, 16)
