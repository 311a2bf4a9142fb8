"""What dedup keeps of a document: a hash of its normalised text, and a MinHash of its word 5-grams. Imports no JAX.

Signatures have 128 values, each the least of a multiply-shift hash over the document's shingles. The share of values in
which two agree estimates the Jaccard similarity of the shingle sets (Broder 1997) with a standard error of at most
0.044. Bands of 8 values find candidates: a pair of similarity s shares one of the 16 with probability
1 - (1 - s^8)^16, which is 0.95 at 0.8 and 0.06 at 0.5.
"""

import hashlib
import re
import unicodedata
import zlib

import numpy as np

VALUES, BANDS = 128, 16
SHINGLE = 5
_EAST_ASIAN = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
# Scripts without spaces between words count by character.
_WORD = re.compile(rf"[{_EAST_ASIAN}]|[^\W{_EAST_ASIAN}]+")
_RANDOM = np.random.Generator(np.random.PCG64(0))
_FACTORS = _RANDOM.integers(0, 1 << 63, VALUES, np.uint64) * np.uint64(2) + np.uint64(1)
_ADDENDS = _RANDOM.integers(0, 1 << 63, VALUES, np.uint64)
_BASE = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 1 << 14


def normalised(text: str) -> str:
    """Text for comparison: composed (NFC), lower case, every stretch of white space one space."""
    return " ".join(unicodedata.normalize("NFC", text).lower().split())


def exact_key(text: str) -> bytes:
    """16 bytes that are equal where the normalised texts are."""
    return hashlib.sha256(normalised(text).encode("utf-8")).digest()[:16]


def signature(text: str) -> np.ndarray:
    """MinHash of the text's shingles, uint32 [VALUES]."""
    shingles = _shingles(normalised(text))
    least = np.full(VALUES, np.iinfo(np.uint32).max, np.uint32)
    for start in range(0, len(shingles), _BLOCK):
        block = shingles[start : start + _BLOCK]
        for i in range(VALUES):
            least[i] = min(least[i], ((block * _FACTORS[i] + _ADDENDS[i]) >> np.uint64(32)).min())
    return least


def bands(signatures: np.ndarray) -> np.ndarray:
    """uint64 [n, BANDS]: a hash of each band of the signatures, uint32 [n, VALUES]."""
    parts = signatures.reshape(len(signatures), BANDS, VALUES // BANDS).astype(np.uint64)
    mixed = np.zeros(parts.shape[:2], np.uint64)
    for i in range(parts.shape[2]):
        mixed = _mix(mixed ^ parts[:, :, i]) + _BASE
    return mixed


def similarity(a: np.ndarray, b: np.ndarray) -> float:
    """Estimated Jaccard similarity of two signatures."""
    return float((a == b).mean())


def _shingles(text: str) -> np.ndarray:
    """Hashes of the different word 5-grams, uint64; of all words where there are fewer, of the text where none."""
    words = _WORD.findall(text) or [text]
    # CRC-32 alone is linear; the mix makes sums of its values differ where texts differ.
    hashes = _mix(np.array([zlib.crc32(word.encode("utf-8")) for word in words], np.uint64) + _BASE)
    count = min(SHINGLE, len(hashes))
    combined = np.zeros(len(hashes) - count + 1, np.uint64)
    for i in range(count):
        combined = _mix(combined * _BASE + hashes[i : i + len(combined)])
    return np.unique(combined)


def _mix(values: np.ndarray) -> np.ndarray:
    """Finaliser of SplitMix64 (Steele, Lea and Flood 2014), uint64 wrapping."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
