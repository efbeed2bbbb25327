"""Engines that speculate, and a record of every draft they make."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from engine import counters, greedy, prompts, running
from vllm import LLM, SamplingParams
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator


class Draft(NamedTuple):
    """One draft of one request.

    ``position``: of its first query; ``tokens``: proposed; ``hidden``: [queries, hidden_size],
    the drafter's states, in which a single wrong row of its KV shows.
    """

    position: int
    tokens: list[int]
    hidden: torch.Tensor


Drafts = dict[int, list[Draft]]


class Record:
    """Drafts by request, in the order of requests."""

    def __init__(self) -> None:
        self._by_id: dict[str, list[Draft]] = defaultdict(list)
        self.on_draft: list[Callable[[Any, Any, torch.Tensor], None]] = []
        """Called after each draft with speculator, batch and rejected rows per request."""

    def take(self) -> Drafts:
        """Return the drafts since the last call; requests are counted from 0."""
        by_number = {int(name.split("-")[0]): drafts for name, drafts in self._by_id.items()}
        self._by_id.clear()
        return {i: by_number[number] for i, number in enumerate(sorted(by_number))}

    def note(self, speculator: Any, batch: Any, drafts: torch.Tensor) -> None:
        """Add one step."""
        queries = speculator.num_query_per_req
        for i, name in enumerate(batch.req_ids):
            rows = slice(i * queries, (i + 1) * queries)
            self._by_id[name].append(
                Draft(
                    int(speculator.input_buffers.positions[i * queries]),
                    drafts[i].tolist(),
                    speculator.last_hidden[rows].clone(),
                )
            )


@contextmanager
def recorded(monkeypatch: Any) -> Iterator[Record]:
    """A record of the drafts of all engines that are built inside."""
    record = Record()
    propose, run_model = DFlashSpeculator.propose, DFlashSpeculator._run_model

    def run_and_keep(self, *args, **kwargs):
        self.last_hidden = run_model(self, *args, **kwargs)
        return self.last_hidden

    def propose_and_note(self, batch, *args, **kwargs):
        drafts = propose(self, batch, *args, **kwargs)
        if not kwargs.get("dummy_run") and not batch.req_ids[0].startswith("_"):
            record.note(self, batch, drafts)
            for listener in record.on_draft:
                listener(self, batch, args[5])
        return drafts

    with monkeypatch.context() as patch:
        patch.setattr(DFlashSpeculator, "_run_model", run_and_keep)
        patch.setattr(DFlashSpeculator, "propose", propose_and_note)
        yield record


class Outcome(NamedTuple):
    """What an engine made of some prompts.

    ``tokens``: by request; ``drafts``: by request and step; ``accepted``: drafts by place;
    ``counters``: of /metrics.
    """

    tokens: list[list[int]]
    drafts: Drafts
    accepted: list[int]
    counters: dict[str, float]


def speculate(
    monkeypatch: Any,
    model: Any,
    dhisparse: dict[str, Any],
    lengths: Sequence[int],
    max_tokens: int,
    *,
    temperature: float = 0,
    **options: Any,
) -> Outcome:
    """Answer random prompts of these lengths in an engine of their own."""
    with recorded(monkeypatch) as record, running(model, dhisparse, **options) as llm:
        if temperature:
            tokens = sampled(llm, prompts(*lengths), max_tokens, temperature)
        else:
            tokens = greedy(llm, prompts(*lengths), max_tokens)
        return Outcome(tokens, record.take(), accepted_per_place(llm), counters(llm))


def sampled(llm: LLM, token_ids: Any, max_tokens: int, temperature: float) -> list[list[int]]:
    """A seeded sample of continuations."""
    settings = SamplingParams(
        temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=7
    )
    outputs = llm.generate(
        [{"prompt_token_ids": list(ids)} for ids in token_ids], settings, use_tqdm=False
    )
    return [list(output.outputs[0].token_ids) for output in outputs]


def accepted_per_place(llm: LLM) -> list[int]:
    """vLLM's own counter of accepted drafts by place."""
    found = [m.values for m in llm.get_metrics() if m.name.endswith("accepted_tokens_per_pos")]
    return list(found[0]) if found else []


def assert_same_drafts(one: Drafts, other: Drafts) -> None:
    """Every draft of every step equal, to the last bit of the drafter's states."""
    assert one.keys() == other.keys()
    for request, drafts in one.items():
        places = [(d.position, d.tokens) for d in drafts]
        assert places == [(d.position, d.tokens) for d in other[request]], request
        for draft, twin in zip(drafts, other[request], strict=True):
            assert torch.equal(draft.hidden, twin.hidden), (request, draft.position)
