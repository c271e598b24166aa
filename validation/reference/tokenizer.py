"""The byte-level BPE tokenizer of the reference model."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

END_OF_TEXT = "<|endoftext|>"


def train_tokenizer(texts: Iterable[str], entries: int, longest: int) -> PreTrainedTokenizerFast:
    """Learn a byte-level BPE; the same texts in the same order give the same tokenizer.

    Parameters
    ----------
    texts : iterable of str
        The training texts.
    entries : int
        Vocabulary size, the end-of-text token included.
    longest : int
        The longest sequence the model accepts.

    Returns
    -------
    PreTrainedTokenizerFast
        It adds no special token on its own; ``<|endoftext|>`` is its bos, eos and pad token.
    """
    bpe = Tokenizer(models.BPE())
    # AutoTokenizer gives every Qwen2 model these rules, whatever the stored tokenizer says; learning under
    # any other rules would make a vocabulary that does not fit the way text is cut later.
    rules = Qwen2Tokenizer().backend_tokenizer
    bpe.normalizer, bpe.pre_tokenizer, bpe.decoder = rules.normalizer, rules.pre_tokenizer, rules.decoder
    trainer = trainers.BpeTrainer(
        vocab_size=entries,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=longest,
        clean_up_tokenization_spaces=False,
    )
