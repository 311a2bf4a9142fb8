import json
import shutil
import zlib

import numpy as np
import pytest

from k3train.config.errors import UserError
from k3train.data.config import DataConfig
from k3train.data.prepare import ensure_store
from k3train.data.store import open_store
from k3train.data.tokenizer import ByteTokenizer


@pytest.fixture
def copied(store, tmp_path):
    """A copy to be damaged."""
    return shutil.copytree(store.path, tmp_path / "copy")


def header_with(folder, **changes):
    file = folder / "header.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_reads_across_shards(store):
    split = store.train
    assert split.tokens > 3 * split.shard_tokens
    whole = split.read(0, split.tokens)
    assert whole.dtype == np.int32
    raw = b"".join(file.read_bytes() for file in sorted(split.folder.glob("tokens-*.bin")))
    np.testing.assert_array_equal(whole, np.frombuffer(raw, "<u2"))
    for start, stop in ((0, 0), (990, 1000), (996, 997), (997, 2500), (split.tokens - 1, split.tokens)):
        np.testing.assert_array_equal(split.read(start, stop), whole[start:stop])
    with pytest.raises(IndexError):
        split.read(0, split.tokens + 1)


def test_open_checks_tokenizer_and_vocabulary(store):
    opened = open_store(store.path, vocab_size=259, tokenizer=ByteTokenizer())
    assert opened.fingerprint == store.fingerprint
    with pytest.raises(UserError, match=r"holds token id 258, but model.vocab_size is 258 \(ids 0..257\)"):
        open_store(store.path, vocab_size=258)
    other = ByteTokenizer()
    other.fingerprint = "0" * 64
    with pytest.raises(UserError, match=r"made by tokenizer bytes .* but data.tokenizer is bytes 000000000000"):
        open_store(store.path, tokenizer=other)


def test_no_store(tmp_path):
    with pytest.raises(UserError, match="no token store here"):
        open_store(tmp_path)


def test_truncated_shard(copied):
    file = copied / "train" / "tokens-00001.bin"
    file.write_bytes(file.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"tokens-00001.bin: 1992 bytes, but the header says 1994; truncated"):
        open_store(copied)


@pytest.mark.parametrize("name", ["train/tokens-00000.bin", "train/doc_offsets.bin", "holdout/token_bytes.bin"])
def test_missing_file(copied, name):
    (copied / name).unlink()
    with pytest.raises(
        UserError, match=f"{name}: missing from the token store. Delete the folder and prepare it again"
    ):
        open_store(copied)


def test_flipped_bit_is_found_by_verify(copied):
    file = copied / "train" / "tokens-00000.bin"
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    store = open_store(copied)
    with pytest.raises(UserError, match=r"tokens-00000.bin: contents differ .* in 1 of 1 blocks, .* bytes 0 to 1994"):
        store.verify()


def test_damage_is_told_by_the_block(copied, monkeypatch):
    """A store with small blocks, written by hand into the header."""
    file = copied / "train" / "tokens-00000.bin"
    data = file.read_bytes()
    header = json.loads((copied / "header.json").read_text())
    (entry,) = (entry for entry in header["files"] if entry["name"] == "train/tokens-00000.bin")
    entry["block_bytes"] = 500
    entry["blocks"] = [f"{zlib.crc32(data[i : i + 500]):08x}" for i in range(0, len(data), 500)]
    header_with(copied, files=header["files"])
    open_store(copied).verify()
    file.write_bytes(data[:1200] + bytes([data[1200] ^ 1]) + data[1201:])
    with pytest.raises(UserError, match="in 1 of 4 blocks, the first being bytes 1000 to 1500"):
        open_store(copied).verify()


def test_a_store_of_version_1_is_read(store, copied):
    header = json.loads((copied / "header.json").read_text())
    for entry in header["files"]:
        del entry["block_bytes"], entry["blocks"]
    for name in ("metadata_fields", "max_document_bytes"):
        del header["source"][name]
    for name in ("records", "duplicates"):
        del header[name]
    (copied / "header.json").write_text(json.dumps(header | {"format_version": 1}))
    old = open_store(copied)
    old.verify()
    assert old.fingerprint == store.fingerprint
    config = {
        "store": str(copied),
        "sequence_length": 32,
        "holdout": 0.2,
        "source": {"files": list(header["source"]["patterns"])},
    }
    ensure_store(DataConfig.model_validate(config))


@pytest.mark.parametrize("name", ["train/tokens-00000.bin", "train/doc_offsets.bin", "holdout/token_bytes.bin"])
def test_a_flipped_bit_is_found_where_a_store_is_opened_to_be_read(copied, monkeypatch, name):
    """Small stores whole; of large ones everything but the tokens, and that is said."""
    data = bytearray((copied / name).read_bytes())
    data[len(data) // 2] ^= 1
    (copied / name).write_bytes(data)
    config = DataConfig.model_validate({"store": str(copied), "sequence_length": 32, "holdout": 0.2})
    said = []
    with pytest.raises(UserError, match=f"{name}: contents differ from the header's checksum"):
        ensure_store(config, say=said.append)
    monkeypatch.setattr("k3train.data.prepare.VERIFIED", 0)
    if "tokens-" in name:
        ensure_store(config, say=said.append)
        assert "were not compared with their checksums" in said[0]
    else:
        with pytest.raises(UserError, match="contents differ"):
            ensure_store(config, say=said.append)


def test_id_beyond_the_header_is_refused_when_read(copied):
    file = copied / "train" / "tokens-00000.bin"
    data = bytearray(file.read_bytes())
    data[101] = 0xFF
    file.write_bytes(data)
    store = open_store(copied)
    with pytest.raises(UserError, match=r"a file is damaged"):
        store.train.read(0, 100)
    assert len(store.train.read(60, 90)) == 30


def test_offsets_that_go_back(copied):
    file = copied / "train" / "doc_offsets.bin"
    offsets = np.frombuffer(file.read_bytes(), "<i8").copy()
    offsets[2] = offsets[1]
    file.write_bytes(offsets.tobytes())
    with pytest.raises(UserError, match="do not agree with the header"):
        open_store(copied)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"format_version": 5}, "format version 5, but this k3train reads 1 to 4"),
        ({"dtype": "<f4"}, "broken header"),
        ({"surprise": 1}, "broken header"),
        ({"shard_tokens": 2000}, "agree|not listed"),
        ({"files": []}, "not listed in the header"),
    ],
)
def test_header_that_does_not_fit(copied, changes, says):
    header_with(copied, **changes)
    with pytest.raises(UserError, match=says):
        open_store(copied)


@pytest.mark.parametrize("text", ["", "{", "[]", '"text"'])
def test_header_that_is_no_header(copied, text):
    (copied / "header.json").write_text(text)
    with pytest.raises(UserError, match="broken header"):
        open_store(copied)


def test_fingerprint_follows_the_contents(store, copied):
    header = json.loads((copied / "header.json").read_text())
    header["files"][0]["sha256"] = "0" * 64
    header_with(copied, files=header["files"])
    assert open_store(copied).fingerprint != store.fingerprint
