"""Inputs of the bfloat16 kernels of MLA's attention, and what float64 makes of the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
from kda_cases import GRADIENTS, RESULTS, errors

from k3train.kernels.attention.api import attention

OWN, SHARED, VALUE = 128, 64, 128
SCALE = (OWN + SHARED) ** -0.5
DOCUMENTS = (100, 60, -30, 7, 150, 13)
"""Lengths of documents, negative for padding; 360 tokens, three blocks, the last ragged."""


def inputs(tokens: int, heads: int = 2, rows: int = 1, *, seed: int = 0, spread: float = 1.0) -> dict[str, jax.Array]:
    """Normal q, k, shared, v and do, bfloat16; ``spread`` is a factor on q, which makes the softmax sharper."""
    rng = np.random.default_rng(seed)
    normal = lambda *size: jnp.asarray(rng.standard_normal(size), jnp.bfloat16)  # noqa: E731
    head = lambda width: normal(rows, tokens, heads, width)  # noqa: E731
    q = (head(OWN + SHARED).astype(jnp.float32) * spread).astype(jnp.bfloat16)
    return {"q": q, "k": head(OWN), "shared": normal(rows, tokens, SHARED), "v": head(VALUE), "do": head(VALUE)}


def kernels(arguments, segment_ids):
    """o and max_logit by the kernels."""
    a = arguments
    return attention(
        a["q"], a["k"], a["v"], shared=a["shared"], scale=SCALE, segment_ids=segment_ids, implementation="mosaic_gpu"
    )


def value_and_gradients(arguments, segment_ids) -> dict[str, jax.Array]:
    """Everything the kernels compute, by name."""
    given = {name: x for name, x in arguments.items() if name != "do"}
    (o, top), pull = jax.vjp(lambda a: kernels(a, segment_ids), given)
    return {"o": o, "top": top} | pull((arguments["do"].astype(o.dtype), jnp.zeros_like(top)))[0]


def wanted(arguments, segment_ids) -> dict[str, np.ndarray]:
    """The same in float64, written out."""
    a = {name: np.asarray(x, np.float64) for name, x in arguments.items()}
    rows, tokens, heads, _ = a["q"].shape
    ids = np.ones((rows, tokens)) if segment_ids is None else np.asarray(segment_ids)
    seen = (ids[:, :, None] == ids[:, None]) & (ids[:, :, None] != 0) & np.tri(tokens, dtype=bool)  # [B, T, S]
    shared = np.broadcast_to(a["shared"][:, :, None], (rows, tokens, heads, SHARED))
    k = np.concatenate([a["k"], shared], axis=-1)
    scores = SCALE * np.einsum("bthd,bshd->bhts", a["q"], k)
    scores = np.where(seen[:, None], scores, -np.inf)
    top = np.max(scores, axis=-1, keepdims=True)
    p = np.exp(scores - np.where(np.isinf(top), 0, top))
    p /= np.maximum(np.sum(p, axis=-1, keepdims=True), 1e-300)
    o = np.einsum("bhts,bshv->bthv", p, a["v"])
    dp = np.einsum("bthv,bshv->bhts", a["do"], a["v"])
    ds = SCALE * p * (dp - np.einsum("bthv,bthv->bht", a["do"], o)[..., None])
    dk = np.einsum("bhts,bthd->bshd", ds, a["q"])
    return {
        "o": o,
        "top": np.max(top, axis=(0, 2, 3)),
        "q": np.einsum("bhts,bshd->bthd", ds, k),
        "k": dk[..., :OWN],
        "shared": np.sum(dk[..., OWN:], axis=2),
        "v": np.einsum("bhts,bthv->bshv", p, a["do"]),
    }


def assert_near(found, want) -> None:
    """Within the limits."""
    far = errors(found, want)
    print(shown := "  ".join(f"{name} {error:.1e}" for name, error in far.items()))
    limits = dict.fromkeys(far, GRADIENTS) | {"o": RESULTS, "top": 1e-5}
    assert all(far[name] <= limits[name] for name in far), shown
