"""A small byte-level BPE tokenizer with a chat template."""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY_SIZE = 512
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
SPECIAL_TOKENS = (BOS, EOS, PAD, *ROLES)  # their ids are their places here

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + (message['content'] or '') }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

_TRAINING_TEXT = Path(__file__).resolve().parent.parent / "LICENSE"


def write_tokenizer(directory: Path, max_model_len: int) -> Tokenizer:
    """Train the tokenizer on the project's licence and write it to ``directory``.

    Args:
        directory: existing folder of the model.
        max_model_len: longest sequence, in tokens, that the model accepts.
    """
    tokenizer = train_tokenizer(_TRAINING_TEXT.read_text(encoding="utf-8"), VOCABULARY_SIZE)
    save_tokenizer(tokenizer, directory, max_model_len)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_model_len: int) -> None:
    """Write a tokenizer and its chat template in the layout of Hugging Face."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,  # it would change the text
        "model_max_length": max_model_len,
    }
    text = json.dumps(settings, indent=2) + "\n"
    (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")


def printable_tokens(tokenizer: Tokenizer) -> list[int]:
    """Ids of the tokens that are printable ASCII text, in ascending order."""

    def is_printable(token: int) -> bool:
        text = tokenizer.decode([token], skip_special_tokens=True)
        return text.isascii() and text.isprintable() and text != ""

    return [token for token in range(tokenizer.get_vocab_size()) if is_printable(token)]


def train_tokenizer(text: str, vocabulary_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer whose first ids are the special tokens.

    Every byte is a token, so ``decode(encode(text)) == text`` for any text, and no
    special token is added unless a chat template asks for it.

    Raises:
        ValueError: the text is too short for the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    if tokenizer.get_vocab_size() != vocabulary_size:
        raise ValueError(
            f"training text too short: {tokenizer.get_vocab_size()} of {vocabulary_size} tokens"
        )
    return tokenizer
