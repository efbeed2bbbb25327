"""The target's rows while drafts are verified: rejected ones are never served.

Failure cases F18 (accepted across a page), F19 and F20 (nothing accepted), F21 (later queries see
earlier drafts) and F22 (tails grow while drafts are verified).
"""

from collections import Counter

import pytest
import torch
from checked import checked
from draft_record import recorded
from engine import RESIDENT, counters, greedy, prompts, running
from speculation_settings import speculative_config
from vllm.distributed.kv_transfer import get_kv_transfer_group

from vllm_dhisparse.integration.kv_spec import is_indexer_spec
from vllm_dhisparse.integration.worker_side import latent_layers
from vllm_dhisparse.integration.worker_state import WorkerState
from vllm_dhisparse.runtime.tables import UNIT_ROWS

# Accepted drafts cross units of 64 rows and host pages of 128.
LENGTHS = (60, 123, 126, 250)
TOKENS = 12


@pytest.fixture(scope="module")
def pair(tiny_pair):
    return tiny_pair(method="dspark", window=40)


class CommittedRows:
    """After each step: the latent rows of each request below its accepted length."""

    def __init__(self):
        self.steps = []

    def __call__(self, speculator, batch, num_rejected):
        rows = {}
        ends = batch.query_start_loc[1 : batch.num_reqs + 1].tolist()
        for i, name in enumerate(batch.req_ids):
            committed = int(batch.positions[ends[i] - 1]) + 1 - int(num_rejected[i])
            rows[int(name.split("-")[0])] = self.read(speculator, i, torch.arange(committed))
        self.steps.append([rows[number] for number in sorted(rows)])


class ResidentRows(CommittedRows):
    def read(self, speculator, request, positions):
        """Rows of all layers, [layers, positions, row_size], from vLLM's blocks."""
        groups = speculator.kv_cache_config.kv_cache_groups
        group_of = {name: i for i, group in enumerate(groups) for name in group.layer_names}
        context = speculator.vllm_config.compilation_config.static_forward_context
        rows = []
        for name, layer in latent_layers(group_of, context).items():
            cache = layer.kv_cache
            table = speculator.block_tables.input_block_tables[group_of[name]][request].long()
            block = table[positions // cache.shape[1]]
            rows.append(cache[block, positions % cache.shape[1]])
        return torch.stack(rows)


class HostRows(CommittedRows):
    def read(self, speculator, request, positions):
        """The same from the host pool; the map must name slots with equal rows."""
        worker = get_kv_transfer_group().worker.state
        tables = worker.tables
        address = next(
            number
            for number, group in enumerate(speculator.kv_cache_config.kv_cache_groups)
            if is_indexer_spec(group.kv_cache_spec)
        )
        blocks = speculator.block_tables.input_block_tables[address][request].long()
        page_rows = tables.sizes.page_rows
        page = tables.page_of_block[blocks[positions // page_rows]].long()
        host_row = page * page_rows + positions % page_rows
        rows = []
        for place in worker.places:
            home = place.host.pages.flatten(0, 1)[host_row]
            slot = tables.slot_of_row[place.index_group][host_row].long()
            mapped = slot >= 0
            unit = tables.unit_blocks[slot[mapped] // UNIT_ROWS, place.latent_group].long()
            on_device = place.kv_cache[unit, slot[mapped] % UNIT_ROWS]
            assert torch.equal(on_device, home[mapped]), "a map entry is stale"
            rows.append(home)
        return torch.stack(rows)


@pytest.mark.parametrize(
    ("drafts", "max_tokens"),
    [
        pytest.param({}, 24, id="real acceptance"),
        pytest.param(
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.0] * 4},
            6,
            id="nothing accepted",
        ),
    ],
)
def test_committed_host_rows_are_the_resident_rows_after_each_step(
    pair, monkeypatch, drafts, max_tokens
):
    model, drafter = pair
    options = {
        "speculative_config": speculative_config("dspark", drafter, 4, **drafts),
        "max_model_len": 512,
        "max_num_seqs": 4,
    }
    resident, host = ResidentRows(), HostRows()
    with recorded(monkeypatch) as record:
        with running(model, RESIDENT, **options) as llm:
            record.on_draft.append(resident)
            expected = greedy(llm, prompts(*LENGTHS), max_tokens)
            record.on_draft.clear()
        with checked(monkeypatch, model, **options) as llm:
            record.on_draft.append(host)
            assert greedy(llm, prompts(*LENGTHS), max_tokens) == expected
            found = counters(llm)
    assert len(host.steps) == len(resident.steps) > 4
    for step, (ours, theirs) in enumerate(zip(host.steps, resident.steps, strict=True)):
        for request, (row, twin) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(row, twin), (step, request)
    accepted = found.get("vllm:spec_decode_num_accepted_tokens{}", 0)
    proposed = found["vllm:spec_decode_num_draft_tokens{}"]
    if drafts:
        assert accepted == 0
    else:
        assert proposed > accepted > proposed // 4


class IndependentCount:
    """Missing rows of each step and index group, from the selections alone."""

    def __init__(self, monkeypatch):
        self.rows = Counter()
        self.own_rows_selected = 0
        resolve = WorkerState.resolve

        def count_and_resolve(state, selected, index_group):
            inputs, tables = state.step_inputs(), state.tables
            queries = inputs.queries
            request = queries.request_of_token.long()[:, None].expand_as(selected)
            chosen = (selected >= 0) & (selected < queries.visible[:, None])
            page_rows = tables.sizes.page_rows
            position = selected.clamp(min=0).long()
            block = queries.block_table[request, position // page_rows].long()
            row = tables.page_of_block[block].long() * page_rows + position % page_rows
            written = set(inputs.host_rows.tolist())
            missing = set()
            for asked in row[chosen].tolist():
                if asked in written:
                    self.own_rows_selected += 1
                elif tables.slot_of_row[index_group, asked] < 0:
                    missing.add(asked)
            resolve(state, selected, index_group)
            plans = state.resolution.plans
            fetched = torch.cat([plan.union[plan.fetch] for plan in plans]).tolist()
            assert sorted(fetched) == sorted(missing), "a missing row must cross exactly once"
            assert not written & set(fetched), "a row of this step was fetched"
            prefill = bool(inputs.metadata.is_prefill.all())
            name = "prefill" if prefill else "verify" if inputs.metadata.verifies else "decode"
            self.rows[name] += len(fetched)

        monkeypatch.setattr(WorkerState, "resolve", count_and_resolve)


@pytest.mark.parametrize("num_drafts", [1, 4, 7])
def test_each_missing_row_crosses_once_however_many_queries_select_it(
    pair, monkeypatch, num_drafts
):
    model, drafter = pair
    options = {
        "speculative_config": speculative_config("dspark", drafter, num_drafts),
        "max_model_len": 512,
        "max_num_seqs": 4,
    }
    count = IndependentCount(monkeypatch)
    with running(model, {"residency": "fixed"}, **options) as llm:
        for prompt in prompts(*LENGTHS):  # one at a time: steps have one phase
            greedy(llm, [prompt], TOKENS)
        found = counters(llm)
    assert count.own_rows_selected > 0
    assert count.rows["verify"] > 0
    for phase in ("prefill", "decode", "verify"):
        fetched = found.get(f"vllm:dhisparse_fetched_rows{{{phase}}}", 0)
        assert fetched == count.rows[phase], phase
    missing = found["vllm:dhisparse_selected_rows{verify,host}"]
    assert missing > count.rows["verify"], "queries share missing rows"
    layers = 6  # each takes the one staging area once a step
    steps = found["vllm:dhisparse_staging_acquires{verify}"] / layers
    assert steps == found["vllm:spec_decode_num_drafts{}"]
