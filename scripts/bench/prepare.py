"""``data prepare`` against what the tokenizer's library alone reaches on all cores, over the same documents.

    python scripts/bench/prepare.py CONFIG --runs 5 data.tokenizer.kind=huggingface data.tokenizer.path=tokenizer.json

Alone, the library gets the texts from memory, in batches (``--batch``), with as many threads as cores. ``prepare``
reads the sources, tokenizes, splits, shuffles and writes a store with its checksums, into a temporary folder; it must
have made as many tokens. The runs take turns, the library first in every other pair; medians are compared. Goal: 90 %.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from k3train.config.errors import UserError
from k3train.config.load import load
from k3train.data.build import describe_source
from k3train.data.config import DataConfig
from k3train.data.prepare import prepare
from k3train.data.records import Document, Fields
from k3train.data.sources import Piece, read_piece
from k3train.data.tokenizer import load_tokenizer
from k3train.data.workers import cores
from k3train.experiment import Experiment


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the stores are written (default: the temporary folder)")
    parser.add_argument("--batch", type=int, default=512, help="documents that the library alone gets at a time")
    parser.add_argument("--json", type=Path)
    return parser.parse_intermixed_args()


def texts_of(config: DataConfig) -> list[str]:
    """All documents, in memory."""
    source = config.source
    if source is None:
        raise UserError("data.source: nothing to read")
    paths = [file.path for file in describe_source(source, print).files]
    fields = Fields(source.text_field, (), source.max_document_bytes)
    records = read_piece(Piece(tuple(range(len(paths)))), paths, fields, source.corpus)
    return [record.text for record in records if isinstance(record, Document)]


def library_of(config: DataConfig) -> Callable[[list[str]], int]:
    """The library's own call for a batch; gives the count of ids."""
    path = config.tokenizer.path
    if config.tokenizer.kind == "huggingface":
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        tokenizer.encode_special_tokens = True
        return lambda texts: sum(len(e) for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False))
    if config.tokenizer.kind == "tiktoken":
        encoding = load_tokenizer(config.tokenizer)._encoding
        return lambda texts: sum(map(len, encoding.encode_ordinary_batch(texts, num_threads=cores())))
    raise UserError("data.tokenizer.kind: bytes has no library to compare with")


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    args = arguments()
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    config = load(args.config, args.overrides, Experiment).experiment.data
    texts, library = texts_of(config), library_of(config)
    size = sum(len(text.encode("utf-8")) for text in texts)
    taken: dict[str, list[float]] = {"library": [], "prepare": []}
    batches = [texts[i : i + args.batch] for i in range(0, len(texts), args.batch)]

    def alone() -> int:
        return sum(library(batch) for batch in batches)

    tokens = alone()

    def prepared() -> None:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            header = prepare(config.model_copy(update={"store": f"{folder}/store"}), say=lambda _: None).header
        sides = header.train, header.holdout_split
        added = (header.add_bos + header.add_eos) * sum(side.documents for side in sides)
        if sum(side.tokens for side in sides) - added != tokens:
            raise UserError(f"prepare stored other tokens than the library's {tokens:,}: no comparison")

    for run in range(args.runs):
        pair = [("library", alone), ("prepare", prepared)]
        for name, call in pair if run % 2 == 0 else pair[::-1]:
            taken[name].append(seconds(call))
    medians = {name: statistics.median(values) for name, values in taken.items()}
    print(
        f"{len(texts):,} documents, {size / 1e6:.1f} MB, {tokens:,} tokens; {cores()} cores; {args.runs} runs of each"
    )
    ratio = medians["library"] / medians["prepare"]
    print("\n| what | median, s | least to most, s | Mtok/s | of the library |\n|---|---|---|---|---|")
    for name, values in taken.items():
        spread = f"{min(values):.2f} to {max(values):.2f}"
        speed, share = tokens / medians[name] / 1e6, medians["library"] / medians[name]
        print(f"| {name} | {medians[name]:.2f} | {spread} | {speed:.3f} | {share:.1%} |")
    if args.json:
        args.json.write_text(json.dumps({"tokens": tokens, "bytes": size, "seconds": taken, "ratio": ratio}))


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from error
