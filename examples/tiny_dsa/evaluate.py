"""What the target can do: recall by length and depth, text, and locality of its selections.

cd examples && python -m tiny_dsa.evaluate MODEL_DIRECTORY [--json FILE]
"""

import argparse
import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from tiny_dsa.checkpoint import read_target
from tiny_dsa.data import RECALL, Source, text_pieces
from tiny_dsa.decode import Reader
from tiny_dsa.model import DENSE, SHUFFLED, SPARSE, DsaModel

NEEDLES = 32
LENGTHS = (1024, 4096, 8192, 16384)
LOCALITY_CONTEXT = 4096
CACHE_SIZES = (1, 2, 4, 8)  # rows of an LRU cache, in units of index_topk
SEED = 1


def recall(
    model: DsaModel, source: Source, mode: str, length: int, rows: int, needles: int = NEEDLES
) -> float:
    """Share of numbers recalled, over needles spread evenly over held-back text.

    Args:
        model: whose greedy choice counts.
        source: of held-back text.
        mode: of `DsaModel`.
        length: tokens of a sequence, its questions at the end.
        rows: number of sequences, all needles asked for in each.
        needles: per sequence.
    """
    generator = torch.Generator().manual_seed(SEED)
    right = 0
    for number in range(rows):
        source.random.seed(f"{SEED}/{length}/{number}")
        row = source.questions(length, needles, needles)
        tokens = torch.from_numpy(row.tokens)[None]
        reader = Reader(model, 1, length, mode, generator)
        choice = reader.logits(reader.feed(tokens[:, :-1]))[0].argmax(-1)
        asked = torch.from_numpy(row.kinds[1:] == RECALL)
        right += int((choice == tokens[0, 1:])[asked].sum())
    return right / (rows * needles)


def text_loss(model: DsaModel, source: Source, mode: str, length: int, rows: int) -> float:
    """Mean loss of held-back text, in nats per token."""
    total = 0.0
    for number in range(rows):
        source.random.seed(f"{SEED}/text/{number}")
        tokens = torch.from_numpy(source.text(length).tokens)[None]
        reader = Reader(model, 1, length, mode)
        logits = reader.logits(reader.feed(tokens[:, :-1]))[0]
        total += F.cross_entropy(logits, tokens[0, 1:]).item()
    return total / rows


def selections(model: DsaModel, source: Source, context: int, steps: int) -> dict[int, np.ndarray]:
    """Positions chosen while the model goes on with text: int64 [steps, index_topk] by leader."""
    source.random.seed(f"{SEED}/selections")
    prompt = torch.from_numpy(source.text(context).tokens)[None]
    reader = Reader(model, 1, context + steps, SPARSE, keeps_selections=True)
    tokens = torch.from_numpy(source.text(steps + 1).tokens[1:])[None]
    reader.feed(prompt)
    for each in reader.selections.values():
        each.clear()
    for step in range(steps):
        reader.feed(tokens[:, step : step + 1])
    return {
        leader: np.stack([mask[0, 0].nonzero()[:, 0].numpy() for mask in masks])
        for leader, masks in reader.selections.items()
    }


def adjacent_overlap(positions: np.ndarray) -> float:
    """Mean share of a selection that the selection before had too."""
    pairs = zip(positions[1:], positions[:-1], strict=True)
    return float(np.mean([np.isin(now, before).mean() for now, before in pairs]))


def lru_misses(positions: np.ndarray, capacity: int, context: int) -> float:
    """Share of selected rows that a cache of ``capacity`` rows misses, after a warm-up.

    The least recently selected row goes first, never one of the current selection. A
    step's own row is written on the device, so it never misses. The first quarter of the
    steps is not counted.

    Args:
        positions: int64 [steps, index_topk].
        capacity: at least index_topk.
        context: position of the first step's own row.
    """
    cache: OrderedDict[int, None] = OrderedDict()
    misses, counted = 0, 0
    for step, selection in enumerate(positions):
        cache[context + step] = None
        for row in selection.tolist():
            if step >= len(positions) // 4:
                counted += 1
                misses += row not in cache
            cache[row] = None
            cache.move_to_end(row)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return misses / counted


def figures(model: DsaModel, tokenizer: Tokenizer, rows: int, steps: int) -> dict[str, Any]:
    """All figures of the model card."""
    source = Source(tokenizer, text_pieces()[1], SEED)
    result: dict[str, Any] = {"recall": {}, "text_loss": {}, "locality": {}}
    for length in LENGTHS:
        fewer = max(1, rows * LENGTHS[0] // length)
        result["recall"][length] = {
            mode: recall(model, source, mode, length, fewer) for mode in (DENSE, SPARSE, SHUFFLED)
        }
        print(length, result["recall"][length], flush=True)
    for mode in (DENSE, SPARSE):
        result["text_loss"][mode] = text_loss(model, source, mode, 1024, 8)
    top_k = model.config["index_topk"]
    for leader, positions in selections(model, source, LOCALITY_CONTEXT, steps).items():
        result["locality"][leader] = {"adjacent_overlap": adjacent_overlap(positions)} | {
            f"lru_misses_{size}k": lru_misses(positions, size * top_k, LOCALITY_CONTEXT)
            for size in CACHE_SIZES
        }
    return result


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rows", type=int, default=16, help="sequences of 1024 tokens")
    parser.add_argument("--steps", type=int, default=768, help="of the locality figures")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.directory / "tokenizer.json"))
    result = figures(read_target(options.directory), tokenizer, options.rows, options.steps)
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
