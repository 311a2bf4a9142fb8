"""A token store out of its sources: pieces tokenized on all cores, then merged, with an exact account. No JAX."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from k3train.config.errors import UserError
from k3train.data.config import DataConfig, SourceConfig
from k3train.data.corpora import get_corpus, locate
from k3train.data.duplicates import read_list
from k3train.data.files import describe, find_files
from k3train.data.fill_in_middle import FillInMiddle
from k3train.data.folder import clear_work, disk_errors, work_folder, written_whole
from k3train.data.header import FileEntry, Header, SourceHeader, TokenizerHeader
from k3train.data.integrity import HEADER
from k3train.data.piecework import BAD, Work, do, finished
from k3train.data.records import BadRecord
from k3train.data.sources import Piece, cut
from k3train.data.store import HOLDOUT, SKIPS, TRAIN
from k3train.data.text_files import count_lines
from k3train.data.tokenizer import Tokenizer
from k3train.data.workers import Workers, cores
from k3train.data.writer import HOLDOUT_RULE, Merge

QUARANTINE = "quarantine.jsonl"
_EARLY = 100_000
"""Records after which a share of bad ones that is too large stops a prepare before its end."""


@dataclass(frozen=True)
class Progress:
    """How far a prepare is: bytes of the sources tokenized so far and in all, documents so far."""

    bytes_done: int
    bytes_total: int
    documents: int


def build(
    config: DataConfig,
    tokenizer: Tokenizer,
    say: Callable[[str], None],
    progress: Callable[[Progress], None],
    shard_tokens: int,
    piece_bytes: int | None,
) -> None:
    """Make the store of the config, whole or not at all. Call inside ``folder.exclusive``.

    Raises:
      UserError: see ``prepare.prepare``.
    """
    assert config.source is not None  # prepare sees to it
    folder = Path(config.place)
    origin = describe_source(config.source, say)
    pieces = cut(origin.files, piece_bytes)
    digest, dropped = "", {}
    if config.source.duplicates is not None:
        digest, dropped = read_list(
            config.source.duplicates, origin.files, config.source.text_field, config.source.prompt_field
        )
        origin = origin.model_copy(update={"duplicates": digest})
    with disk_errors(folder):
        work = Work(
            config,
            origin.files,
            work_folder(folder),
            "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4",
            tokenizer.fingerprint,
            digest,
        )
        builder = _Builder(work, tokenizer, pieces, dropped, say, progress)
        count = min(config.source.workers or cores(), len(builder.todo))
        with Workers(count, work.dump(), builder.here) as workers:
            builder.tokenize(workers)
            builder.check()
            with written_whole(folder) as partial:
                builder.write(workers, partial, origin, shard_tokens)
        clear_work(folder)


class _Builder:
    """Pieces, what became of them, and the store made of them."""

    def __init__(
        self,
        work: Work,
        tokenizer: Tokenizer,
        pieces: list[Piece],
        dropped: dict[str, list[int]],
        say: Callable[[str], None],
        progress: Callable[[Progress], None],
    ):
        self.dropped = dropped
        self.work, self.tokenizer, self.pieces, self.progress = work, tokenizer, pieces, progress
        assert work.config.source is not None
        self.source = work.config.source
        self.names = [work.name(piece) for piece in pieces]
        self.reports: dict[int, dict[str, Any]] = {}
        self.total = sum(piece.bytes for piece in pieces)
        self._take_up(say)
        self.todo = [i for i in range(len(pieces)) if i not in self.reports]

    def _take_up(self, say: Callable[[str], None]) -> None:
        """Find the pieces that an earlier prepare finished; what else it left goes."""
        wanted = {name: i for i, name in enumerate(self.names)}
        for left in sorted(self.work.folder.iterdir()):
            report = finished(left) if left.name in wanted else None
            if report is not None:
                self.reports[wanted[left.name]] = report
            elif left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink()
        if self.reports:
            say(f"{len(self.reports)} of {len(self.pieces)} pieces were tokenized before; going on from there")

    def here(self, job: dict[str, Any]) -> Any:
        """Do a job in this process, its documents shown as they come."""
        done, documents = self._done()
        tick: Callable[[int], None] = lambda n: self.progress(Progress(done, self.total, documents + n))  # noqa: E731
        return do(self.work, self.tokenizer, job, tick)

    def _done(self) -> tuple[int, int]:
        documents = sum(side["documents"] for report in self.reports.values() for side in report["sides"].values())
        return sum(self.pieces[i].bytes for i in self.reports), documents

    def tokenize(self, workers: Workers) -> None:
        """Read and tokenize what is left to do.

        Raises:
          UserError: the first bad record of all, under ``on_bad_record: error``; see ``check`` under the others.
        """
        jobs = []
        for i in self.todo:
            piece = self.pieces[i]
            stretch = {"files": piece.files, "start": piece.start, "stop": piece.stop, "bytes": piece.bytes}
            jobs.append({"do": "piece", "dropped": self._dropped_in(piece)} | stretch)
        bad: dict[int, dict[str, Any]] = {}
        for number, result in workers.map(jobs):
            if "bad_record" in result:
                bad[self.todo[number]] = result["bad_record"]
                continue
            self.reports[self.todo[number]] = result
            self.progress(Progress(self._done()[0], self.total, self._done()[1]))
            self.check(at_least=_EARLY)
        if bad:
            first = min(bad)
            record = self._placed(bad[first], self.pieces[first])
            raise UserError(f"{record}. Mend the file, or set data.source.on_bad_record: skip")

    def _dropped_in(self, piece: Piece) -> list[tuple[str, int]]:
        """Documents of a piece that the list of duplicates names."""
        paths = [self.work.files[i].path for i in piece.files]
        names = paths if self.source.corpus is None else list(self.dropped)
        found = [(name, at) for name in names for at in self.dropped.get(name, [])]
        if paths[0].endswith(".jsonl") and piece.stop is not None:
            return [(name, at) for name, at in found if piece.start <= at < piece.stop]
        return found

    def _placed(self, bad: dict[str, Any], piece: Piece) -> BadRecord:
        """The record with its line counted from the start of its file."""
        before = count_lines(bad["file"], piece.start) if piece.start and bad["offset"] >= 0 else 0
        return BadRecord(bad["file"], before + bad["line"], bad["offset"], bad["kind"], bad["detail"])

    def check(self, at_least: int = 0) -> None:
        """Raise UserError where more records are bad than ``data.source.max_bad_share``, among ``at_least`` or more."""
        records = sum(report["records"] for report in self.reports.values())
        kinds = self._bad_kinds()
        count = sum(kinds.values())
        if records >= at_least and count > self.source.max_bad_share * records:
            reasons = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items()))
            first = self._first_bad()
            raise UserError(
                f"data.source: {count} of {records} records are bad ({reasons}), and data.source.max_bad_share is "
                f"{self.source.max_bad_share:g}. The first: {first['file']}: line {first['line']}: {first['reason']}. "
                "Mend the files, or raise the share"
            )

    def _bad_kinds(self) -> Counter[str]:
        return sum((Counter(report["bad"]) for report in self.reports.values()), Counter())

    def _first_bad(self) -> dict[str, Any]:
        return next(entry for i in sorted(self.reports) for entry in self._bad_entries(i))

    def _bad_entries(self, i: int) -> list[dict[str, Any]]:
        """Bad records of a piece, with their lines counted from the start of their files."""
        text = (self.work.folder / self.names[i] / BAD).read_text(encoding="utf-8")
        entries = [json.loads(line) for line in text.split("\n") if line]
        first = self._first_line(i)
        return [entry | {"line": entry["line"] + (first if entry["offset"] >= 0 else 0)} for entry in entries]

    def _first_line(self, i: int) -> int:
        """Lines of the file of a piece of plain JSONL that lie before it."""
        piece = self.pieces[i]
        if not piece.start or not self.work.files[piece.files[0]].path.endswith(".jsonl"):
            return 0
        earlier = [j for j in range(i) if self.pieces[j].files == piece.files]
        if all(j in self.reports for j in earlier):
            return sum(self.reports[j]["records"] for j in earlier)
        return count_lines(self.work.files[piece.files[0]].path, piece.start)

    def write(self, workers: Workers, partial: Path, origin: SourceHeader, shard_tokens: int) -> None:
        """Merge the pieces into ``partial``; the header last."""
        order = range(len(self.pieces))
        folders = [self.work.folder / name for name in self.names]
        first_lines = [self._first_line(i) for i in order]
        merges = {
            side: Merge(folders, side, [self.reports[i]["sides"][side] for i in order], first_lines)
            for side in (TRAIN, HOLDOUT)
        }
        self._check_sides(merges)
        entries: list[FileEntry] = []
        for side, merge in merges.items():
            entries += self._write_side(workers, merge, partial / side, shard_tokens)
        self._write_bad(partial)
        tokenizer, config = self.tokenizer, self.work.config
        header = Header(
            dtype="<u2" if self.work.dtype == "<u2" else "<u4",
            shard_tokens=shard_tokens,
            tokenizer=TokenizerHeader.of(tokenizer),
            add_bos=config.add_bos,
            add_eos=config.add_eos,
            holdout=config.holdout,
            holdout_rule=HOLDOUT_RULE,
            shuffle_seed=config.shuffle_seed,
            fill_in_middle=FillInMiddle(config.fill_in_middle, tokenizer).header if config.fill_in_middle else None,
            source=origin,
            train=merges[TRAIN].header,
            holdout_split=merges[HOLDOUT].header,
            skipped=dict(sorted(self._bad_kinds().items())),
            records=sum(report["records"] for report in self.reports.values()),
            duplicates=sum(report["duplicates"] for report in self.reports.values()),
            files=entries,
        )
        (partial / HEADER).write_text(header.model_dump_json(indent=1), encoding="utf-8")

    def _write_side(self, workers: Workers, merge: Merge, out: Path, shard_tokens: int) -> list[FileEntry]:
        out.mkdir()
        plan = f"{merge.side}.plan.npy"
        np.save(self.work.folder / plan, merge.plan)
        job = {"do": "shard", "side": merge.side, "plan": plan, "out": str(out), "shard_tokens": shard_tokens}
        indices: list[int | None] = list(range(-(-merge.header.tokens // shard_tokens)))
        if merge.side == HOLDOUT and merge.header.tokens:
            indices.append(None)
        jobs = [job | {"folders": self.names, "index": index} for index in indices]
        written = {i: FileEntry.model_validate(entry) for i, entry in workers.map(jobs)}
        return [written[i] for i in range(len(jobs))] + merge.write_tables(out)

    def _write_bad(self, partial: Path) -> None:
        quarantined = self.source.on_bad_record == "quarantine"
        with (partial / SKIPS).open("w", encoding="utf-8") as skips:
            for i in range(len(self.pieces)):
                for entry in self._bad_entries(i):
                    plain = {name: value for name, value in entry.items() if name not in ("bytes", "is_cut")}
                    skips.write(json.dumps(plain, ensure_ascii=False) + "\n")
                    if quarantined:
                        with (partial / QUARANTINE).open("a", encoding="utf-8") as kept:
                            kept.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def _check_sides(self, merges: dict[str, Merge]) -> None:
        if merges[TRAIN].header.documents:
            return
        held = merges[HOLDOUT].header.documents
        if held:
            raise UserError(
                f"data.holdout {self.work.config.holdout}: all {held} documents are held out and none is left to train "
                "on; lower data.holdout or bring more documents"
            )
        kinds = self._bad_kinds()
        reasons = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        raise UserError(
            f"data.source: no documents are left ({sum(kinds.values())} records skipped: {reasons or 'none'})"
        )


def describe_source(source: SourceConfig, say: Callable[[str], None]) -> SourceHeader:
    """What the source is, with its files.

    Raises:
      UserError: no such file, or one cannot be read; the corpus cannot be fetched.
    """
    if source.corpus is not None:
        corpus = get_corpus(source.corpus)
        paths, licence = [str(locate(corpus, say))], corpus.licence
    else:
        paths, licence = find_files(source.files), "not stated"
    with ThreadPoolExecutor(min(cores(), 16)) as threads:
        files = list(threads.map(describe, paths))
    return SourceHeader(
        corpus=source.corpus,
        patterns=list(source.files),
        text_field=source.text_field,
        metadata_fields=source.metadata_fields,
        prompt_field=source.prompt_field,
        masked_field=source.masked_field,
        max_document_bytes=source.max_document_bytes,
        on_bad_record=source.on_bad_record,
        licence=licence,
        files=files,
    )
