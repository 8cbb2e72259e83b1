"""A small byte-level BPE tokenizer of GPT-2's kind, trained in a second: codes fall into several tokens."""

from __future__ import annotations

from functools import cache


@cache
def bpe():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    core.decoder = decoders.ByteLevel()
    text = [*(f" {letter}" for letter in "ABCEIJ"), "codes: heart failure, diabetes mellitus without complications, chronic obstructive pulmonary disease\n"] * 50
    core.train_from_iterator(text, trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", clean_up_tokenization_spaces=False)


def token(text: str) -> int:
    """The id of a text that is one token."""
    ids = bpe()(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == 1, (text, ids)
    return ids[0]
