"""The token store that a config names: made where it is absent, checked where it is there. Imports no JAX."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from k3train.config.errors import UserError
from k3train.data.build import Progress, build
from k3train.data.config import DataConfig
from k3train.data.fill_in_middle import FillInMiddle
from k3train.data.folder import clear_leftovers, clear_work, disk_errors, exclusive
from k3train.data.in_place import index
from k3train.data.integrity import HEADER, refuse_address
from k3train.data.match import difference
from k3train.data.store import Store, open_store
from k3train.data.stores import Stores
from k3train.data.tokenizer import Tokenizer, load_tokenizer
from k3train.data.writer import SHARD_TOKENS

Say = Callable[[str], None]
VERIFIED = 1 << 30
"""Bytes of tokens that are compared with their checksums when a store is opened: about a second's reading."""


def prepare(
    config: DataConfig,
    *,
    replace: bool = False,
    say: Say = print,
    progress: Callable[[Progress], None] = lambda _: None,
    shard_tokens: int = SHARD_TOKENS,
    piece_bytes: int | None = None,
) -> Store:
    """Make the store that the config names, or open it where it is there already.

    The store appears whole or not at all; a store that is already there stays until the new one is complete. What a
    prepare that was killed or failed had tokenized is taken up.

    Args:
      config: the data section; ``source`` is needed.
      replace: make it anew even where there is one.
      say: receives lines for a person.
      progress: called as files are read.
      shard_tokens: tokens in a shard.
      piece_bytes: size of what a worker reads at a time; none chooses (``sources.cut``).

    Raises:
      UserError: bad input under ``on_bad_record: error`` or too much of it, nothing to train on, a store made
        otherwise, no disk space.
    """
    refuse_address(config.place)
    folder = Path(config.place)
    if os.path.islink(folder):  # noqa: PTH114 - Path.is_symlink raises where a name is too long
        # What takes its place must take that of the folder, not of the link.
        folder = Path(os.path.realpath(folder))
        config = config.model_copy(update={"store": str(folder)})
    if config.source is None:
        raise UserError("data.source: nothing to prepare from; name a corpus or files, or an existing data.store")
    tokenizer = load_tokenizer(config.tokenizer)
    _check_policy(config, tokenizer)
    with disk_errors(folder):
        is_there = (folder / HEADER).is_file()
    if not replace and is_there:
        clear_leftovers(folder)
        return _matching(folder, config, tokenizer)
    with exclusive(folder, say):
        if (folder / HEADER).is_file():
            if not replace:
                clear_work(folder)
                return _matching(folder, config, tokenizer)
        elif folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
            raise UserError(f"{folder}: something that is no token store lies there; it is left alone. Mend data.store")
        if config.source.kind == "text":
            build(config, tokenizer, say, progress, shard_tokens, piece_bytes)
        else:
            index(config, tokenizer, progress)
    return open_store(folder, tokenizer=tokenizer)


def ensure_store(
    config: DataConfig, *, say: Say = print, progress: Callable[[Progress], None] = lambda _: None
) -> Store:
    """The store of a config of one source; see :func:`ensure_stores`."""
    return ensure_stores(config, say=say, progress=progress).only


def ensure_stores(
    config: DataConfig,
    *,
    is_leader: bool = True,
    barrier: Callable[[], None] = lambda: None,
    vocab_size: int | None = None,
    say: Say = print,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Stores:
    """The stores of the config, each prepared from its source where it is absent.

    Of several processes the leader prepares and the others wait at ``barrier``, which every process reaches exactly
    once, a failing leader too.

    Raises:
      UserError: see ``prepare`` and ``open_store``; a store was made from something else than the config says; it
        holds ids that a model of ``vocab_size`` does not know; its files are not as they were written.
    """
    singles = config.singles()
    try:
        for name, single in singles.items():
            if is_leader and single.source is not None:
                with naming(name):
                    prepare(single, say=say, progress=progress)
    finally:
        barrier()
    tokenizer = load_tokenizer(config.tokenizer)
    stores: dict[str, Store] = {}
    left_out: dict[str, int] = {}
    for name, single in singles.items():
        with naming(name):
            stores[name] = open_store(single.place, vocab_size=vocab_size, tokenizer=tokenizer)
            difference(stores[name], single, tokenizer, with_files=False)
            left_out[name] = stores[name].verify(VERIFIED // len(singles))
    for name, count in left_out.items():
        if count and is_leader:
            say(
                f"{stores[name].path}: {count / 2**30:.1f} GiB of tokens were not compared with their checksums; "
                "k3train data inspect --verify does it"
            )
    return Stores(stores)


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Begins the messages of user errors with the source they concern, where it has a name."""
    try:
        yield
    except UserError as error:
        if not source:
            raise
        raise UserError(f"data.sources.{source}: {error}", error.exit_code) from error


def _matching(folder: Path, config: DataConfig, tokenizer: Tokenizer) -> Store:
    store = open_store(folder)
    difference(store, config, tokenizer)
    return store


def _check_policy(config: DataConfig, tokenizer: Tokenizer) -> None:
    for key, wanted, id_ in (
        ("add_bos", config.add_bos, tokenizer.bos_id),
        ("add_eos", config.add_eos, tokenizer.eos_id),
    ):
        if wanted and id_ is None:
            raise UserError(
                f"data.{key}: the tokenizer {config.tokenizer.path} names no {key[4:].upper()} token. Set data.{key}: "
                f"false, or name it as {key[4:]}_token in a tokenizer_config.json beside it"
            )
    if config.fill_in_middle is not None:
        if config.source is not None and config.source.kind != "text":
            raise UserError(
                f"data.fill_in_middle: tokens of data.source.kind: {config.source.kind} are read as they lie, so no "
                "document is rearranged; leave it out"
            )
        FillInMiddle(config.fill_in_middle, tokenizer)
