"""Chunked cross entropy: values and gradients of the plain form, without its memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxprs import equations

from k3train.kernels.cross_entropy.api import cross_entropy
from k3train.kernels.cross_entropy.specs import CASES, TOLERANCE


def draw(case, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    hidden = jnp.asarray(rng.standard_normal((case.tokens, case.hidden)), dtype)
    head = jnp.asarray(rng.standard_normal((case.hidden, case.vocab)), dtype)
    targets = rng.integers(0, case.vocab, case.tokens)
    targets[:2] = 0, case.vocab - 1
    mask = rng.random(case.tokens) < 0.7
    mask[:2] = True
    return hidden, head, jnp.asarray(targets, jnp.int32), jnp.asarray(mask)


def expected(hidden, head, targets, mask, z_loss, g_loss, g_z):
    """Loss, z, correct and both gradients in NumPy float64."""
    h, w = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
    t, m = np.asarray(targets), np.asarray(mask)
    logits = h @ w
    peak = logits.max(-1, keepdims=True)
    lse = np.log(np.exp(logits - peak).sum(-1)) + peak[:, 0]
    hit = np.eye(w.shape[1])[t]
    loss = ((lse - logits[np.arange(len(t)), t]) * m).sum()
    p = np.exp(logits - lse[:, None])
    d = m[:, None] * (g_loss * (p - hit) + g_z * 2 * z_loss * lse[:, None] * p)
    return loss, z_loss * (lse**2 * m).sum(), ((logits.argmax(-1) == t) & m).sum(), d @ w.T, h.T @ d


def close(got, want, tolerance):
    got = np.asarray(got, np.float64)
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want), np.linalg.norm(got - want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, dtype):
    case = CASES[name]
    args = draw(case, dtype)
    z_loss, g_loss, g_z = 0.01, 0.7, -1.3  # cotangents of the two sums differ, so neither may leak into the other

    def objective(hidden, head):
        out = cross_entropy(hidden, head, *args[2:], z_loss=z_loss, chunk=case.chunk, token_block=case.token_block)
        return g_loss * out.loss_sum + g_z * out.z_sum, out

    (_, out), (d_hidden, d_head) = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True))(*args[:2])
    loss, z, correct, want_hidden, want_head = expected(*args, z_loss, g_loss, g_z)
    assert out.loss_sum.dtype == out.z_sum.dtype == jnp.float32
    assert d_hidden.dtype == d_head.dtype == args[0].dtype
    close(out.loss_sum, loss, 2e-6)
    close(out.z_sum, z, 2e-6)
    assert int(out.correct) == correct
    close(d_hidden, want_hidden, TOLERANCE[dtype])
    close(d_head, want_head, TOLERANCE[dtype])
    assert not np.asarray(d_hidden, np.float32)[~np.asarray(args[3])].any()


def test_reference_equals_numpy():
    args = draw(CASES["ragged"])
    got = cross_entropy(*args, z_loss=0.1, implementation="reference")
    loss, z, correct, *_ = expected(*args, 0.1, 1, 0)
    close(got.loss_sum, loss, 2e-6)
    close(got.z_sum, z, 2e-6)
    assert int(got.correct) == correct


def test_all_masked_is_zero():
    hidden, head, targets, mask = draw(CASES["one_chunk"])

    def loss(hidden, head):
        out = cross_entropy(hidden, head, targets, jnp.zeros_like(mask), z_loss=1.0)
        return out.loss_sum + out.z_sum

    value, grads = jax.value_and_grad(loss, (0, 1))(hidden, head)
    assert float(value) == 0
    assert not np.asarray(grads[0]).any() and not np.asarray(grads[1]).any()


def test_large_logits_stay_finite():
    hidden, head, targets, mask = draw(CASES["one_over"])
    out, grad = jax.value_and_grad(lambda h: cross_entropy(h, head, targets, mask, chunk=256).loss_sum)(hidden * 1e4)
    assert np.isfinite(float(out)) and np.isfinite(np.asarray(grad)).all()


def test_equal_logits_count_as_the_first():
    hidden, targets = jnp.zeros((3, 4)), jnp.asarray([0, 1, 299], jnp.int32)
    out = cross_entropy(hidden, jnp.ones((4, 300)), targets, jnp.ones(3, bool), chunk=128)
    assert int(out.correct) == 1


def test_no_array_holds_all_logits():
    tokens, width, vocab = 256, 8, 2048
    hidden, head = jnp.ones((tokens, width)), jnp.ones((width, vocab))
    targets, mask = jnp.zeros(tokens, jnp.int32), jnp.ones(tokens, bool)

    def biggest(**how):
        def loss(hidden, head):
            return cross_entropy(hidden, head, targets, mask, **how).loss_sum

        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1)))(hidden, head).jaxpr
        return max(v.aval.size for equation in equations(jaxpr) for v in equation.outvars)

    assert biggest(implementation="reference") >= tokens * vocab
    assert biggest(chunk=128, token_block=64) <= max(64 * 128, width * vocab, tokens * width)


def test_sharded_tokens_stay_on_their_devices():
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",), axis_types=(AxisType.Auto,))
    case = CASES["divides"]
    args = draw(case)
    tokens, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    placed = [jax.device_put(x, s) for x, s in zip(args, (tokens, whole, tokens, tokens), strict=True)]

    def loss(hidden, head, targets, mask):
        return cross_entropy(hidden, head, targets, mask, chunk=case.chunk, token_block=case.token_block).loss_sum

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    value, grads = step(*placed)
    want, want_grads = step(*args)
    close(value, float(want), 1e-6)
    for got, wanted in zip(grads, want_grads, strict=True):
        close(got, np.asarray(wanted, np.float64), 1e-6)
    text = step.lower(*placed).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text
