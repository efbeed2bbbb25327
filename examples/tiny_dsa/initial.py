"""Where training starts: random weights, with a rough draft of the circuit for recall.

The budget is minutes on a CPU, too little to wait until recall appears out of nothing. So
layer 0 starts with a head that reads the token before and notes it beside the token's own
code; the third layer starts with a head that looks for rows whose note is the current token.
Indexers start alike: the first near the query, the second by note. All of it is trained on.
"""

import math

import torch
from torch import Tensor

from tiny_dsa.model import Attention, DsaModel, Indexer

CODE = slice(1, 64)  # channels of a token's own code
NOTE = slice(65, 128)  # channels of the code of the token before
CONSTANT = 4.0  # channel 0 is the same for every token
PREVIOUS_GAIN = 20.0  # peak of the position score of the head that reads the token before
MATCH_GAIN = 3.5
FOUND_GAIN = 2.0
HEAD_GAIN = 0.08


@torch.no_grad()
def initialise(model: DsaModel, seed: int, plain: bool = False) -> None:
    """Set all weights; equal seeds give equal weights.

    Args:
        model: to be trained.
        seed: of the random weights.
        plain: random weights and nothing else.
    """
    generator = torch.Generator().manual_seed(seed)
    depth = model.config["num_hidden_layers"]
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        noise = torch.randn(weight.shape, generator=generator) / math.sqrt(weight.shape[1])
        if "o_proj" in name or "down_proj" in name:
            noise *= 0.3 / math.sqrt(2 * depth)
        weight.copy_(noise)
    if plain:
        return
    code = torch.randn(model.embed_tokens.weight.shape, generator=generator)
    code[:, 0], code[:, NOTE], code[:, 64] = CONSTANT, 0.1 * code[:, NOTE], 0.0
    model.embed_tokens.weight.copy_(code)
    code[:, 0], code[:, NOTE] = 0.0, 0.0
    model.lm_head.weight.copy_(code * HEAD_GAIN)
    theta = model.config["rope_parameters"]["rope_theta"]
    writer, reader = model.layers[0].self_attn, model.layers[model.leaders[-1]].self_attn
    for attention in (writer, reader):
        _pass_through(attention)
    _read_token_before(writer, theta)
    _look_up(reader)
    _choose_near(writer.indexer)
    _choose_by_note(reader.indexer)


def _pass_through(attention: Attention) -> None:
    """Let both latents carry the channels as they are."""
    rank, latent = attention.q_a_proj.weight.shape[0], attention.latent
    attention.q_a_proj.weight.mul_(0.1).add_(torch.eye(rank, attention.q_a_proj.in_features))
    rows = attention.kv_a_proj_with_mqa.weight[:latent]
    rows.mul_(0.1).add_(torch.eye(latent, rows.shape[1]))


def _read_token_before(attention: Attention, theta: float) -> None:
    """Head 0: highest score at distance 1, and the code found goes to the note."""
    nope, rope = attention.nope, attention.rope
    pairs = rope // 2
    frequencies = theta ** -(torch.arange(pairs).float() / pairs)
    used = 12  # the fast ones tell neighbours apart
    gain = PREVIOUS_GAIN * math.sqrt(nope + rope) / used
    # After its norm the constant is about 5 in the layer's input and 3.6 in the query latent.
    queries = attention.q_b_proj.weight[: nope + rope]
    queries.mul_(0.1)
    queries[nope : nope + rope].zero_()
    keys = attention.kv_a_proj_with_mqa.weight[attention.latent :]
    keys.mul_(0.1)
    keys[0 : 2 * used : 2, 0] = 0.5
    queries[nope : nope + 2 * used : 2, 0] = frequencies[:used].cos() * gain / (2.5 * 3.6)
    queries[nope + 1 : nope + 2 * used : 2, 0] = -frequencies[:used].sin() * gain / (2.5 * 3.6)
    _values(attention)
    attention.o_proj.weight[NOTE, CODE] += 0.8 * torch.eye(63)


def _look_up(attention: Attention) -> None:
    """Head 0: rows whose note is the current token; the code found is what comes next."""
    nope, rope = attention.nope, attention.rope
    queries = attention.q_b_proj.weight[: nope + rope]
    queries.mul_(0.05)
    queries[:nope] += MATCH_GAIN * torch.eye(nope)
    queries[0].zero_()
    keys = attention.kv_b_proj.weight[:nope]
    keys.mul_(0.05)
    keys[:, 64:] += torch.eye(nope)
    _values(attention)
    attention.o_proj.weight[CODE, CODE] += FOUND_GAIN * torch.eye(63)


def _values(attention: Attention) -> None:
    """Head 0 carries the code."""
    values = attention.kv_b_proj.weight[attention.nope : attention.nope + attention.value]
    values.mul_(0.05)
    values[CODE, CODE] += torch.eye(63)


def _choose_near(indexer: Indexer) -> None:
    _only_first_head(indexer)
    rope = indexer.rope
    indexer.wk.weight[:rope].mul_(0.1)
    indexer.wk.weight[rope:].mul_(0.3)
    indexer.k_norm.bias[0:rope:2] = 1.0
    indexer.wq_b.weight[0:rope:2, 0] += 1.0


def _choose_by_note(indexer: Indexer) -> None:
    _only_first_head(indexer)
    rope = indexer.rope
    indexer.wk.weight.mul_(0.1)
    indexer.wk.weight[rope:, 64:] += torch.eye(64)
    indexer.wq_b.weight[rope : rope + 64] += torch.eye(64)
    indexer.wq_b.weight[rope].zero_()


def _only_first_head(indexer: Indexer) -> None:
    """Positive weights, most of them on head 0; its queries start nearly silent."""
    weights: Tensor = indexer.weights_proj.weight
    weights.mul_(0.1)
    weights[:, 0] = 0.1
    weights[0, 0] = 1.0
    indexer.wq_b.weight.mul_(0.1)
