"""A tokenizer for a policy of a million parameters: few tokens, and names that can be copied.

Guarantees:

* Any text survives `decode(encode(text))`: what is not in the vocabulary falls back to bytes.
* A word is the same token wherever it stands (after a space, a slash or a quote), so that copying a name from the
  instruction into a command is copying one token. Words, spaces, digits and punctuation never merge with each other.
* The texts in `phrases` (the system prompt, the frame of a tool call) are one token each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML without a tools block: the tools are described in the system message."""

_PIECES = Regex(r"[A-Za-z]+|[0-9]|[^A-Za-z0-9]")


def build_tokenizer(
    texts: Iterable[str], *, vocabulary: int, phrases: Sequence[str], max_length: int
) -> PreTrainedTokenizerFast:
    """Byte-level BPE inside single words, trained on `texts`, with at most `vocabulary` tokens before the phrases."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[PAD, START, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in dict.fromkeys(phrases)])
    made: Any = PreTrainedTokenizerFast  # untyped in transformers
    tokenizer_with_template: PreTrainedTokenizerFast = made(
        tokenizer_object=tokenizer,
        chat_template=CHAT_TEMPLATE,
        pad_token=PAD,
        eos_token=END,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    return tokenizer_with_template
