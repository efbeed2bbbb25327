import pytest

from vllm_dhisparse.core.page_plan import check_host_pool, plan_pages


@pytest.mark.parametrize(
    ("latent_row", "indexer_row", "page", "indexer_block"),
    [
        pytest.param(656, 132, 42_240, 320, id="GLM-5.3 fp8_ds_mla"),
        pytest.param(1152, 132, 76_032, 576, id="GLM-5.3 bf16"),
        pytest.param(656, 132, 5 * 8448, 320, id="DeepSeek-V3.2 fp8_ds_mla"),
        pytest.param(320, 256, 32_768, 128, id="tiny fp32"),
        pytest.param(160, 132, 16_896, 128, id="tiny bf16"),
        pytest.param(96, 256, 16_384, 64, id="latent smaller than indexer"),
    ],
)
def test_plan_pads_the_latent_page_to_whole_indexer_blocks(
    latent_row, indexer_row, page, indexer_block
):
    plan = plan_pages(latent_row, indexer_row)
    assert plan.latent_block_tokens == 64
    assert (plan.page_bytes, plan.indexer_block_tokens) == (page, indexer_block)
    assert plan.page_size_padded == page
    assert plan.indexer_block_tokens * indexer_row == page
    assert 0 <= page - 64 * latent_row < 64 * indexer_row


def test_padding_of_glm_is_small():
    assert plan_pages(656, 132).padding_ratio == pytest.approx(0.006, abs=1e-3)
    assert plan_pages(1152, 132).padding_ratio == pytest.approx(0.030, abs=1e-3)


def test_nothing_is_padded_when_the_sizes_already_fit():
    plan = plan_pages(512, 128)
    assert plan.page_size_padded is None
    assert plan.indexer_block_tokens == 256
    assert plan.padding_ratio == 0


def test_resident_layers_need_padding_only_beside_a_drafter():
    assert plan_pages(656, 132).resident_page_size_padded is None
    assert plan_pages(656, 132, drafter_row_bytes=512).resident_page_size_padded == 42_240


@pytest.mark.parametrize(
    ("drafter_row", "page", "draft_block"),
    [
        pytest.param(512, 42_240, 80, id="one KV head"),
        pytest.param(2048, 42_240, 16, id="four KV heads"),
        pytest.param(4096, 67_584, 16, id="eight KV heads: the draft page decides"),
    ],
)
def test_a_drafter_gets_the_largest_block_that_fits(drafter_row, page, draft_block):
    plan = plan_pages(656, 132, drafter_row)
    assert (plan.page_bytes, plan.drafter_block_tokens) == (page, draft_block)
    assert draft_block * drafter_row <= page


def test_a_drafter_that_would_waste_every_page_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"131072 B does not fit .* 41984 B.*tensor_parallel_size"):
        plan_pages(656, 132, drafter_row_bytes=8192)


@pytest.mark.parametrize("name", ["latent_row_bytes", "indexer_row_bytes", "drafter_row_bytes"])
def test_sizes_must_be_positive(name):
    sizes = {"latent_row_bytes": 656, "indexer_row_bytes": 132} | {name: 0}
    with pytest.raises(ValueError, match=f"{name} must be positive, got 0"):
        plan_pages(**sizes)


def test_host_pool_smaller_than_one_request_names_the_setting():
    check_host_pool(4, 320, 2**30, max_model_len=1270, num_lookahead_tokens=8)
    with pytest.raises(ValueError, match=r"needs 5: raise dhisparse\.host_pool_gib to at least 5"):
        check_host_pool(4, 320, 2**30, max_model_len=1273, num_lookahead_tokens=8)
