import math
from collections import Counter, defaultdict

import pytest

from k3train.config.errors import UserError
from k3train.data.holdout import holdout_batches
from k3train.data.ngram import evaluate_ngram
from k3train.data.prepare import prepare
from k3train.data.tokenizer import ByteTokenizer, load_tokenizer

from .conftest import quiet


def slow_bits_per_byte(store, order: int) -> float:
    """Interpolated Kneser-Ney with dictionaries, as the formula is written."""

    def grams(split):
        for i in range(split.documents):
            symbols = ["start"] * order + split.document(i).tolist()
            yield from (tuple(symbols[j - order + 1 : j + 1]) for j in range(order + 1, len(symbols)))

    counts = {order: Counter(grams(store.train))}
    for length in range(order - 1, 0, -1):
        counts[length] = Counter(gram[1:] for gram in counts[length + 1])
    followers = {n: defaultdict(list) for n in counts}
    discounts = {}
    for n, table in counts.items():
        for gram, count in table.items():
            followers[n][gram[:-1]].append(count)
        once, twice = (sum(count == k for count in table.values()) for k in (1, 2))
        discounts[n] = once / (once + 2 * twice) if once and twice else 0.5

    def probability(gram) -> float:
        if not gram:
            return 1 / 257
        lower, after = probability(gram[1:]), followers[len(gram)].get(gram[:-1])
        if after is None:
            return lower
        discount = discounts[len(gram)]
        kept = max(counts[len(gram)][gram] - discount, 0)
        return (kept + discount * len(after) * lower) / sum(after)

    nats = -sum(math.log(probability(gram)) for gram in grams(store.holdout))
    return nats / math.log(2) / store.header.holdout_split.source_bytes


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_equals_the_slow_one(store, order):
    result = evaluate_ngram(store, ByteTokenizer(), order)
    assert result.bits_per_byte == pytest.approx(slow_bits_per_byte(store, order), rel=1e-9)


def test_scores_what_an_evaluation_scores(store):
    result, holdout = evaluate_ngram(store, ByteTokenizer()), holdout_batches(store, 32, 4)
    assert result.order == 3
    assert (result.supervised, result.source_bytes) == (holdout.supervised, holdout.source_bytes)


def test_without_specials_too(text_files, make_config):
    store = prepare(make_config(text_files, holdout=0.2, add_bos=False, add_eos=False), say=quiet)
    result, holdout = evaluate_ngram(store, ByteTokenizer()), holdout_batches(store, 32, 4)
    assert (result.supervised, result.source_bytes) == (holdout.supervised, holdout.source_bytes)
    assert 0 < result.bits_per_byte < 8


def test_other_tokenizers_are_scored_in_bytes(store, text_files, make_config, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    specials = ["<s>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    tokenizer.train([str(file) for file in text_files], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = make_config(
        text_files, holdout=0.2, tokenizer={"kind": "huggingface", "path": str(tmp_path / "tokenizer.json")}
    )
    other = prepare(config, say=quiet)
    assert other.header.train.tokens < store.header.train.tokens
    assert other.header.holdout_split.source_bytes == store.header.holdout_split.source_bytes
    assert holdout_batches(other, 32, 4).source_bytes == store.header.holdout_split.source_bytes
    result = evaluate_ngram(other, load_tokenizer(config.tokenizer))
    assert result == evaluate_ngram(store, ByteTokenizer())


@pytest.mark.parametrize("order", [0, 8])
def test_orders_that_do_not_fit(store, order):
    with pytest.raises(UserError, match=f"--order {order}: the n-gram baseline takes 1 to 7"):
        evaluate_ngram(store, ByteTokenizer(), order)


def test_nothing_held_out(text_files, make_config):
    with pytest.raises(UserError, match="no document is held out"):
        evaluate_ngram(prepare(make_config(text_files), say=quiet), ByteTokenizer())
