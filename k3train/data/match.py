"""Whether an existing store is the one that the config describes. Imports no JAX."""

from pathlib import Path

from k3train.config.errors import UserError
from k3train.config.object_store import in_object_store
from k3train.data.config import DataConfig, FillInMiddleConfig
from k3train.data.files import SUFFIXES_OF, describe, find_files, sha256_of
from k3train.data.header import SourceFile
from k3train.data.store import Store
from k3train.data.tokenizer import Tokenizer


def difference(store: Store, config: DataConfig, tokenizer: Tokenizer, *, with_files: bool = True) -> None:
    """Raise UserError that names every field in which the store differs from the config, and the cure.

    Source files are compared by size and time, and by sha256 where the time differs; where none is there any more they
    are not compared, since a store may be carried to another machine. Nor is the source without ``data.source``.
    """
    header = store.header
    pairs: list[tuple[str, object, object]] = [
        ("data.tokenizer.kind", header.tokenizer.kind, tokenizer.kind),
        ("tokenizer fingerprint", header.tokenizer.fingerprint[:12], tokenizer.fingerprint[:12]),
        ("data.add_bos", header.add_bos, config.add_bos),
        ("data.add_eos", header.add_eos, config.add_eos),
        ("data.holdout", header.holdout, config.holdout),
        ("data.shuffle_seed", header.shuffle_seed, config.shuffle_seed),
    ]
    middle = None if config.fill_in_middle is None else config.fill_in_middle.model_dump()
    made_middle = None if header.fill_in_middle is None else header.fill_in_middle.model_dump()
    for key in sorted(FillInMiddleConfig.model_fields if middle or made_middle else ()):
        pairs.append((f"data.fill_in_middle.{key}", (made_middle or {}).get(key), (middle or {}).get(key)))
    if config.source is not None:
        made, wanted = header.source, config.source
        pairs += [
            ("data.source.corpus", made.corpus, wanted.corpus),
            ("data.source.kind", made.kind, wanted.kind),
            ("data.source.token_type", made.token_type, wanted.token_type),
            ("data.source.document_end", made.document_end, wanted.document_end),
            ("data.source.files", made.patterns, list(wanted.files)),
            ("data.source.on_bad_record", made.on_bad_record, wanted.on_bad_record),
        ]
        if wanted.files:
            pairs += [
                ("data.source.text_field", made.text_field, wanted.text_field),
                ("data.source.prompt_field", made.prompt_field, wanted.prompt_field),
                ("data.source.masked_field", made.masked_field, wanted.masked_field),
                ("data.source.metadata_fields", list(made.metadata_fields), list(wanted.metadata_fields)),
            ]
            # A list may stay behind where the store is carried to another machine.
            if not wanted.duplicates or (with_files and Path(wanted.duplicates).is_file()):
                listed = sha256_of(Path(wanted.duplicates)) if wanted.duplicates else ""
                pairs.append(("data.source.duplicates (sha256)", made.duplicates[:12], listed[:12]))
            if made.max_document_bytes:
                limits = made.max_document_bytes, wanted.max_document_bytes
                pairs.append(("data.source.max_document_bytes", *limits))
    faults = [
        f"{name}: the store has {made}, the config says {wanted}" for name, made, wanted in pairs if made != wanted
    ]
    if with_files and config.source is not None and config.source.files and not faults:
        faults = _changed_files(store, config.source.files, SUFFIXES_OF[config.source.kind])
    if faults:
        raise UserError(
            f"{store.path}: this token store was made otherwise than the config says.\n  "
            + "\n  ".join(faults)
            + "\nMake it anew (k3train data prepare CONFIG --replace), name another data.store, or mend the config"
        )


def _changed_files(store: Store, patterns: tuple[str, ...], suffixes: tuple[str, ...]) -> list[str]:
    try:
        present = find_files(patterns, suffixes)
    except UserError:
        return []
    recorded = {file.path: file for file in store.header.source.files}
    faults = [f"{name}: new since the store was made" for name in present if name not in recorded]
    for name, file in recorded.items():
        if name not in present:
            faults.append(f"{name}: gone since the store was made")
            continue
        if _is_changed(name, file):
            faults.append(f"{name}: changed since the store was made")
    for index in store.header.source.indices:
        if not Path(index.path).is_file():
            faults.append(f"{index.path}: gone since the store was made")
        elif _is_changed(index.path, index):
            faults.append(f"{index.path}: changed since the store was made")
    return faults if len(faults) <= 5 else [*faults[:5], f"and {len(faults) - 5} more"]


def _is_changed(name: str, file: SourceFile) -> bool:
    if in_object_store(name):
        now = describe(name)
        return (now.bytes, now.version) != (file.bytes, file.version)
    stat = Path(name).stat()
    return stat.st_size != file.bytes or (stat.st_mtime_ns != file.mtime_ns and sha256_of(Path(name)) != file.sha256)
