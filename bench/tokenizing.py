"""`bench tokenize`: the paragraphs of the corpus to ids, with the same merges, one text at a time and in batches."""
import os
import time
from importlib.util import find_spec

import numpy as np

from minigpt.pretrain_dataset import default_corpus, prepare_corpus, read_corpus, tokenizer_path
from minigpt.tokenizer import SPLIT_PATTERN, Tokenizer

from .measure import interleave, ratio, summary
from .work import Work

ABOUT = "all contenders have the same merges and encode the same texts, in turns; ratios are medians over rounds with their 95 % interval"
ONE_BY_ONE, BATCH, PEER = "tokenizer.encode, one text at a time", "tokenizer.encode_batch", "transformers tokenizer(text), one text at a time"


def byte_names() -> list[str]:
    "The character that stands for each byte in byte-level files of the `tokenizers` library"
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def library_tokenizer(ours: Tokenizer):
    "The `tokenizers` library's own pipeline with our merges and our way to cut"
    from tokenizers import Regex, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    names = byte_names()
    spelled = ["".join(names[b] for b in token) for token in ours.token_bytes[: 256 + len(ours.merges)]]
    library = Library(models.BPE({name: i for i, name in enumerate(spelled)}, [(spelled[a], spelled[b]) for a, b in ours.merges]))
    cut = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated")
    library.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return library


def ways(ours: Tokenizer, texts: list[str]) -> dict:
    "Name -> a function that returns the ids of all texts"
    library = library_tokenizer(ours)
    found = {
        "tokenizers encode, one text at a time": lambda: [library.encode(text).ids for text in texts],
        "tokenizers encode_batch": lambda: [each.ids for each in library.encode_batch(texts)],
        ONE_BY_ONE: lambda: [ours.encode(text) for text in texts],
        BATCH: lambda: ours.encode_batch(texts),
    }
    if find_spec("transformers"):
        from transformers import PreTrainedTokenizerFast

        peer = PreTrainedTokenizerFast(tokenizer_object=library)
        found = {PEER: lambda: [peer(text)["input_ids"] for text in texts], "transformers tokenizer(texts), all at once": lambda: peer(texts)["input_ids"]} | found
    return found


def run(work: Work) -> dict:
    "Seconds for the whole corpus, and whether all give the same ids"
    corpus = default_corpus()
    ours = Tokenizer.load(tokenizer_path(prepare_corpus(corpus, work.config.vocab_size)))
    texts = [line for document in read_corpus(corpus) for line in document.splitlines() if line]
    size, contenders, ids = sum(len(text.encode()) for text in texts), ways(ours, texts), {}

    def turn(name):
        start = time.perf_counter()
        found = contenders[name]()
        seconds = time.perf_counter() - start
        ids[name] = found  # what the round before gave is thrown away here: no contender's time
        return seconds

    seconds = interleave({name: lambda name=name: turn(name) for name in contenders}, work.rounds)
    differ = {name: sum(not np.array_equal(a, b) for a, b in zip(ids[name], ids[ONE_BY_ONE], strict=True)) for name in contenders}
    base = next(iter(contenders))
    rows = [
        dict(name=name, ratio=ratio(seconds[base], values), mb_per_s=size / 1e6 / summary(values)["value"], texts_with_other_ids=differ[name])
        for name, values in seconds.items()
    ]
    figures = dict(ids_differ=sum(differ.values()))
    if base == PEER:
        figures["over_one_by_one"] = ratio(seconds[PEER], seconds[BATCH]) | dict(note=f"{os.cpu_count()} threads, over {PEER}")
    missing = {} if base == PEER else {PEER: ["transformers"]}
    return dict(tables=[dict(title=f"{len(texts):,} texts, {size / 1e6:.1f} MB", base=base, rows=rows)], figures=figures, not_installed=missing, about=ABOUT)
