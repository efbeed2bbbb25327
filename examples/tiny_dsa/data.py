"""What the model is trained on: free text, and tasks that need one far row.

Text is the reference manual that Python's standard library carries for its interactive help
(module ``pydoc_data.topics``; Debian package ``libpython3-stdlib``; PSF licence 2.0).
A *pair* is a name and a number, such as `` Bako 41``. The first time a name occurs its number
is free; each later time the number is the same, wherever the first pair stood.
"""

import random
from dataclasses import dataclass
from pydoc_data.topics import topics

import numpy as np
from tiny_tokenizer import BOS, SPECIAL_TOKENS, train_tokenizer
from tokenizers import AddedToken, Tokenizer

VOCABULARY_SIZE = 1024
NAMES = 128
NUMBERS = 100
FIRST_NAME = VOCABULARY_SIZE - NAMES - NUMBERS
FIRST_NUMBER = FIRST_NAME + NAMES
BOS_ID = SPECIAL_TOKENS.index(BOS)

IGNORED, TEXT, RECALL, COPY = range(4)
KINDS = ("ignored", "text", "recall", "copy")

_PIECE_CHARACTERS = 4000
_HELD_BACK_EVERY = 10
_TRAINING_SHARES = {"pairs": 0.1, "needles": 0.5, "copies": 0.4}


def names() -> list[str]:
    """The names, each with its leading space: two syllables, distinct."""
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    both = [(a + b).capitalize() for a in syllables for b in syllables]
    return [" " + both[(37 * i) % len(both)] for i in range(NAMES)]


def numbers() -> list[str]:
    """The numbers, each with its leading space and two digits."""
    return [f" {i:02d}" for i in range(NUMBERS)]


def text_pieces() -> tuple[list[str], list[str]]:
    """Pieces of the manual, in a fixed order: for training, and held back."""
    whole = "\n\n".join(topics[name].strip() for name in sorted(topics))
    size = _PIECE_CHARACTERS
    pieces = [whole[i : i + size] for i in range(0, len(whole), size)]
    held = pieces[_HELD_BACK_EVERY - 1 :: _HELD_BACK_EVERY]
    del pieces[_HELD_BACK_EVERY - 1 :: _HELD_BACK_EVERY]
    return pieces, held


def make_tokenizer() -> Tokenizer:
    """Train the tokenizer on the text; names and numbers are tokens of their own."""
    tokenizer = train_tokenizer("\n".join(text_pieces()[0]), FIRST_NAME)
    tokenizer.add_tokens([AddedToken(w, normalized=False) for w in names() + numbers()])
    if tokenizer.get_vocab_size() != VOCABULARY_SIZE:
        raise ValueError(f"{tokenizer.get_vocab_size()} of {VOCABULARY_SIZE} tokens are distinct")
    return tokenizer


@dataclass
class Row:
    """One sequence and what of it can be known.

    Attributes:
        tokens: int64 [length], a BOS first.
        kinds: int64 [length], which of ``KINDS`` each token is as something to predict.
    """

    tokens: np.ndarray
    kinds: np.ndarray


class Source:
    """Makes rows of the tasks out of tokenized text; equal seeds give equal rows.

    Args:
        tokenizer: of the model.
        pieces: text to draw from.
        seed: of all choices.
    """

    def __init__(self, tokenizer: Tokenizer, pieces: list[str], seed: int) -> None:
        self._text = np.array(tokenizer.encode("".join(pieces)).ids)
        self.random = random.Random(seed)

    def row(self, length: int) -> Row:
        """A row of a random task."""
        task = self.random.choices(*zip(*_TRAINING_SHARES.items(), strict=True))[0]
        return {"pairs": self.pairs, "needles": self.needles, "copies": self.copies}[task](length)

    def text(self, length: int) -> Row:
        """A row of text alone."""
        start = self.random.randrange(len(self._text) - length)
        return _row([self._text[start : start + length]], [TEXT], length)

    def pairs(self, length: int) -> Row:
        """Pairs and nothing else: half of the tokens are numbers to recall."""
        count = self.random.randint(8, min(NAMES, max(9, length // 4)))
        pairs = self._pairs(count, length // 2)
        return _row([p for p, _ in pairs], [k for _, k in pairs], length)

    def needles(self, length: int) -> Row:
        """Text with pairs at random places, each name two to four times."""
        count = self.random.randint(4, min(NAMES, max(5, length // 12)))
        pairs = self._pairs(count, count * self.random.randint(2, 4))
        text = self.text(length).tokens[1:]
        cuts = sorted(self.random.randrange(len(text)) for _ in pairs)
        parts, kinds = [], []
        for piece, (pair, kind) in zip(np.split(text, cuts), pairs, strict=False):
            parts += [piece, pair]
            kinds += [TEXT, kind]
        parts.append(text[cuts[-1] :])
        kinds.append(TEXT)
        return _row(parts, kinds, length)

    def copies(self, length: int) -> Row:
        """Passages of text or of random tokens, each twice, with text between."""
        parts: list[np.ndarray] = []
        kinds: list[int] = []
        while sum(map(len, parts)) < length:
            size = self.random.randint(8, max(9, length // 4))
            between = self.text(self.random.randint(2, max(3, length // 4))).tokens[1:]
            if self.random.random() < 0.5:
                passage = self.text(size + 1).tokens[1:]
                parts += [passage, between, passage]
                kinds += [TEXT, TEXT, TEXT]
            else:
                first = len(SPECIAL_TOKENS)
                ids = [self.random.randrange(first, VOCABULARY_SIZE) for _ in range(size)]
                passage = np.array(ids)
                parts += [passage, between, passage[:1], passage[1:]]
                kinds += [IGNORED, TEXT, IGNORED, COPY]
        return _row(parts, kinds, length)

    def questions(self, length: int, needles: int, asked: int) -> Row:
        """Text with needles spread evenly over it; at the end ``asked`` names recur.

        The needles asked for are a random choice, so their places are even too. The
        number of each is the only token of kind ``RECALL``.
        """
        chosen = self.random.sample(range(NAMES), needles)
        values = [self.random.randrange(NUMBERS) for _ in chosen]
        both = zip(chosen, values, strict=True)
        pairs = [np.array([FIRST_NAME + name, FIRST_NUMBER + value]) for name, value in both]
        text = self.text(length - 2 * (needles + asked)).tokens[1:]
        cuts = [round((i + 0.5) * len(text) / needles) for i in range(needles)]
        parts, kinds = [], []
        for piece, pair in zip(np.split(text, cuts), pairs, strict=False):
            parts += [piece, pair]
            kinds += [TEXT, IGNORED]
        parts.append(text[cuts[-1] :])
        kinds.append(TEXT)
        for which in self.random.sample(range(needles), asked):
            parts += [pairs[which][:1], pairs[which][1:]]
            kinds += [IGNORED, RECALL]
        return _row(parts, kinds, length)

    def _pairs(self, count: int, total: int) -> list[tuple[np.ndarray, int]]:
        chosen = self.random.sample(range(NAMES), count)
        values = {name: self.random.randrange(NUMBERS) for name in chosen}
        seen: set[int] = set()
        result = []
        for _ in range(total):
            name = self.random.choice(chosen)
            pair = np.array([FIRST_NAME + name, FIRST_NUMBER + values[name]])
            result.append((pair, RECALL if name in seen else IGNORED))
            seen.add(name)
        return result


def _row(parts: list[np.ndarray], kinds: list[int], length: int) -> Row:
    tokens = [np.array([BOS_ID]), *parts]
    spread = [np.array([IGNORED])]
    for part, kind in zip(parts, kinds, strict=True):
        each = np.full(len(part), kind)
        if kind == RECALL:
            each[:-1] = IGNORED  # which name comes is free, only its number is known
        spread.append(each)
    return Row(np.concatenate(tokens)[:length], np.concatenate(spread)[:length])
