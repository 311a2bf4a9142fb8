"""Duplicates among the documents of the sources, exact and near, on one machine. Imports no JAX.

A document is a duplicate where an earlier one that is kept has the same normalised text, or a MinHash that agrees in
``threshold`` of its values. Earlier is the order of the sources, so the list does not depend on workers. Signatures lie
on the disk (512 bytes a document, removed at the end); in memory are about 250 bytes a document, and a few hundred more
for each that shares a band with another.
"""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k3train.config.errors import UserError
from k3train.config.storage import storage, write_whole
from k3train.data.build import Progress, describe_source
from k3train.data.config import DataConfig
from k3train.data.duplicates import identity
from k3train.data.piecework import Work, do
from k3train.data.sketch import VALUES, bands, similarity
from k3train.data.sources import cut
from k3train.data.workers import Workers, cores

_REPRESENTATIVES = 16
"""Kept documents of one band that another is compared with."""


@dataclass(frozen=True)
class Deduplicated:
    """What was found."""

    documents: int
    exact: int
    near: int
    source_bytes: int
    """UTF-8 bytes of all documents."""
    duplicate_bytes: int
    """Of those in the list."""


def dedup(
    config: DataConfig,
    out: Path,
    *,
    threshold: float = 0.8,
    say: Callable[[str], None] = print,
    progress: Callable[[Progress], None] = lambda _: None,
    piece_bytes: int | None = None,
) -> Deduplicated:
    """Find duplicates and write the list ``out``, which ``data.source.duplicates`` names then.

    Args:
      config: the data section; its source is read, its tokenizer is not.
      out: the list; one that is there is replaced.
      threshold: estimated Jaccard similarity of word 5-grams from which on documents are near duplicates.
      say, progress: see ``prepare``.
      piece_bytes: see ``prepare``.

    Raises:
      UserError: bad input, under ``on_bad_record: error``; no text source; the list cannot be written.
    """
    if config.source is None or config.source.kind != "text":
        raise UserError("data.source: dedup reads text; name a corpus or files of kind: text")
    if not 0 < threshold <= 1:
        raise UserError(f"--threshold {threshold}: give a share above 0, up to 1")
    origin = describe_source(config.source, say)
    pieces = cut(origin.files, piece_bytes)
    with storage(out, "write"):
        out.parent.mkdir(parents=True, exist_ok=True)
        work = Work(config, origin.files, Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}.")), "<u2", "")
    try:
        jobs = [
            {"do": "sketch", "files": p.files, "start": p.start, "stop": p.stop, "bytes": p.bytes, "out": f"{i:06d}"}
            for i, p in enumerate(pieces)
        ]
        _sketch(work, jobs, min(config.source.workers or cores(), len(jobs)), progress)
        names, table, keys, signatures = _load(work.folder, [job["out"] for job in jobs])
        listed = _find(keys, signatures, threshold)
        head = identity(origin.files, config.source.text_field, config.source.prompt_field)
        lines = [json.dumps(head | {"threshold": threshold, "listed": len(listed), "documents": len(table)})]
        for document, (kept, share) in sorted(listed.items()):
            kind = "exact" if share is None else "near"
            entry: dict[str, Any] = {"file": names[table[document, 0]], "at": int(table[document, 1]), "kind": kind}
            entry["of"] = {"file": names[table[kept, 0]], "at": int(table[kept, 1])}
            lines.append(json.dumps(entry | ({} if share is None else {"similarity": share}), ensure_ascii=False))
        write_whole(out, "\n".join(lines) + "\n")
    finally:
        shutil.rmtree(work.folder, ignore_errors=True)
    exact = sum(share is None for _, share in listed.values())
    return Deduplicated(
        documents=len(table),
        exact=exact,
        near=len(listed) - exact,
        source_bytes=int(table[:, 2].sum()),
        duplicate_bytes=int(table[sorted(listed), 2].sum()),
    )


def _sketch(work: Work, jobs: list[dict[str, Any]], count: int, progress: Callable[[Progress], None]) -> None:
    total, done, documents = sum(job["bytes"] for job in jobs), 0, 0
    bad: dict[int, str] = {}
    again = "Nothing was written: run it again"
    with Workers(count, work.dump(), lambda job: do(work, None, job), "data dedup", again) as workers:
        for number, result in workers.map(jobs):
            if "bad" in result:
                bad[number] = result["bad"]
                continue
            done, documents = done + jobs[number]["bytes"], documents + result["documents"]
            progress(Progress(done, total, documents))
    if bad:
        raise UserError(f"{bad[min(bad)]}. Mend the file, or set data.source.on_bad_record: skip")


def _load(folder: Path, parts: list[str]) -> tuple[list[str], np.ndarray, np.ndarray, np.ndarray]:
    """File names; int64 [n, 3]: name, place, bytes; exact keys, V16 [n]; signatures, uint32 [n, VALUES], mapped."""
    names: dict[str, int] = {}
    tables, keys = [np.zeros((0, 3), np.int64)], []
    with (folder / "signatures").open("wb") as whole:
        for part in parts:
            local = json.loads((folder / f"{part}.names").read_text(encoding="utf-8"))
            numbers = np.array([names.setdefault(name, len(names)) for name in local], np.int64)
            table = np.load(folder / f"{part}.table.npy")
            if len(table):
                table[:, 0] = numbers[table[:, 0]]
            tables.append(table)
            keys.append((folder / f"{part}.keys").read_bytes())
            with (folder / f"{part}.signatures").open("rb") as file:
                shutil.copyfileobj(file, whole)
            (folder / f"{part}.signatures").unlink()
    table = np.concatenate(tables)
    if not len(table):
        raise UserError("data.source: no documents")
    signatures = np.memmap(folder / "signatures", np.uint32, mode="r").reshape(-1, VALUES)
    return list(names), table, np.frombuffer(b"".join(keys), "V16"), signatures


def _find(keys: np.ndarray, signatures: np.ndarray, threshold: float) -> dict[int, tuple[int, float | None]]:
    """Documents to leave out: each with the kept one, and the similarity where it is a near duplicate."""
    _, firsts, inverse = np.unique(keys, return_index=True, return_inverse=True)
    first = firsts[inverse.reshape(-1)]
    listed: dict[int, tuple[int, float | None]] = {
        int(i): (int(first[i]), None) for i in np.flatnonzero(first != np.arange(len(keys)))
    }
    alone = np.flatnonzero(first == np.arange(len(keys)))
    candidates = _candidates(signatures, alone)
    kept_of: dict[tuple[int, int], list[int]] = {}
    for document in sorted(candidates):
        mine = signatures[document]
        rivals = sorted({rival for place in candidates[document] for rival in kept_of.get(place, [])})
        shares = [(similarity(mine, signatures[rival]), -rival) for rival in rivals]
        best, rival = max(shares, default=(0.0, 0))
        if best >= threshold:
            listed[document] = (-rival, best)
            continue
        for place in candidates[document]:
            places = kept_of.setdefault(place, [])
            if len(places) < _REPRESENTATIVES:
                places.append(document)
    # What an exact duplicate was kept for may itself be a near duplicate.
    for document, (kept, share) in list(listed.items()):
        if share is None and kept in listed:
            listed[document] = (listed[kept][0], None)
    return listed


def _candidates(signatures: np.ndarray, documents: np.ndarray) -> dict[int, list[tuple[int, int]]]:
    """(band, hash) of each document that it shares with another."""
    hashes = np.concatenate(
        [bands(np.asarray(signatures[documents[i : i + 4096]])) for i in range(0, len(documents), 4096)]
    )
    found: dict[int, list[tuple[int, int]]] = {}
    for band in range(hashes.shape[1]):
        column = hashes[:, band]
        _, inverse, counts = np.unique(column, return_inverse=True, return_counts=True)
        for i in np.flatnonzero(counts[inverse] > 1):
            found.setdefault(int(documents[i]), []).append((band, int(column[i])))
    return found
