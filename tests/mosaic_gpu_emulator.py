"""Runs the bodies of Mosaic GPU kernels on the CPU, eagerly, to check their arithmetic.

``emulated(*modules)`` replaces the names ``plgpu``, ``pl`` and ``lax`` of modules that define kernels by stand-ins over
NumPy arrays: one Python thread a warpgroup, barriers that really wait, copies and tensor core products done at once.
Shared memory and outputs nobody wrote hold NaN. Layouts, asynchronous hazards and registers are not seen: lowering for
"cuda" shows the first, only a GPU the others. JAX's own interpreter (0.12) has no ``wgmma`` inside ``run_state``.
"""

import itertools
import threading
import traceback
import types
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np

_local = threading.local()


class Slice:
    """``pl.ds``."""

    def __init__(self, start, size):
        self.start, self.size = int(start), int(size)


def _index(i):
    if isinstance(i, Slice):
        return slice(i.start, i.start + i.size)
    return i if i is Ellipsis or isinstance(i, slice) else int(i)


class At:
    def __init__(self, of):
        self.of = of

    def __getitem__(self, i):
        return self.of(i)


class Ref:
    """A view of an array; stores must have its dtype and shape."""

    def __init__(self, array):
        self.array = array

    shape = property(lambda self: self.array.shape)
    dtype = property(lambda self: self.array.dtype)
    at = property(lambda self: At(lambda i: Ref(self._view(i))))

    def _view(self, i):
        view = self.array[tuple(_index(x) for x in (i if isinstance(i, tuple) else (i,)))]
        assert np.shares_memory(view, self.array) or not view.shape
        return view

    def transpose(self, order):
        return Ref(self.array.transpose(order))

    def __getitem__(self, i):
        return jnp.asarray(np.array(self._view(i)))

    def __setitem__(self, i, value):
        value = np.asarray(value)
        view = self._view(i)
        assert value.dtype == view.dtype, f"store of {value.dtype} to {view.dtype}"
        assert value.shape == view.shape, f"store of {value.shape} to {view.shape}"
        view[...] = value


class Barriers:
    """``plgpu.Barrier``: ``count`` barriers, each done with ``arrivals``."""

    def __init__(self, arrivals, count):
        self.need, self.condition = arrivals, threading.Condition()
        self.arrived, self.done, self.seen = [0] * count, [0] * count, {}

    at = property(lambda self: At(lambda i: (self, int(i))))

    def arrive(self, i):
        with self.condition:
            self.arrived[i] += 1
            if self.arrived[i] == self.need:
                self.arrived[i], self.done[i] = 0, self.done[i] + 1
                self.condition.notify_all()

    def wait(self, i):
        key = (threading.get_ident(), i)
        with self.condition:
            seen = self.seen.get(key, 0)
            assert self.condition.wait_for(lambda: self.done[i] > seen, 120), "deadlock on a barrier"
            assert self.done[i] == seen + 1, "a barrier ran ahead of a waiting thread"
            self.seen[key] = seen + 1


def _one(barrier):
    return barrier if isinstance(barrier, tuple) else (barrier, 0)


class Accumulator:
    """``plgpu.WGMMAAccumulatorRef``."""

    def __init__(self, shape, dtype=jnp.float32):
        self.value = jnp.zeros(shape, dtype)

    shape = property(lambda self: self.value.shape)

    @classmethod
    def init(cls, value):
        made = cls(value.shape, value.dtype)
        made.value = value
        return made

    def __getitem__(self, _):
        return self.value


def _wgmma(acc, a, b):
    # A copy: JAX may read the very memory of a NumPy array, later, when a store has changed it.
    a, b = (jnp.asarray(np.array(x.array)) if isinstance(x, Ref) else x for x in (a, b))
    assert a.dtype == b.dtype, (a.dtype, b.dtype)
    assert acc.shape == (a.shape[0], b.shape[1]) and a.shape[1] == b.shape[0], (acc.shape, a.shape, b.shape)
    acc.value += jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")


def _copy(source, target, barrier=None):
    assert source.shape == target.shape, (source.shape, target.shape)
    assert source.dtype == target.dtype, (source.dtype, target.dtype)
    target.array[...] = source.array
    if barrier is not None:
        barriers, i = _one(barrier)
        barriers.arrive(i)


def _blank(shape, dtype):
    dtype = jnp.dtype(dtype)
    return Ref(np.full(shape, np.nan if jnp.issubdtype(dtype, jnp.floating) else -1).astype(dtype))


def _kernel(body, *, out_type, grid, grid_names, scratch_types, num_threads=1, thread_name=None, **_):
    def call(*args):
        outs = [_blank(o.shape, o.dtype) for o in out_type]
        ins = [Ref(np.array(a)) for a in args]
        for index in itertools.product(*map(range, grid)):
            scratch, errors = {name: make() for name, make in scratch_types.items()}, []

            def run(thread, index=index, scratch=scratch, errors=errors):
                _local.axes = {**dict(zip(grid_names, index, strict=True)), thread_name: thread}
                try:
                    body(*ins, *outs, **scratch)
                except BaseException:  # reported below, in the calling thread
                    errors.append(traceback.format_exc())

            threads = [threading.Thread(target=run, args=(t,)) for t in range(num_threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if errors:
                raise AssertionError(errors[0])
        return [jnp.asarray(o.array) for o in outs]

    return call


def _loop(low, high, **_):
    def run(body):
        for i in range(int(low), int(high)):
            body(jnp.int32(i))

    return run


def _fori_loop(low, high, body, value):
    for i in range(int(low), int(high)):
        value = body(jnp.int32(i), value)
    return value


def _run_state(body):
    def run(state):
        body(state)
        return jax.tree.map(lambda a: a.value, state, is_leaf=lambda a: isinstance(a, Accumulator))

    return run


class _Lax:
    axis_index = staticmethod(lambda name: jnp.int32(_local.axes[name]))
    fori_loop = staticmethod(_fori_loop)

    def __getattr__(self, name):
        return getattr(jax.lax, name)


def _nothing(*_, **__):
    return None


def _stand_ins(real):
    plgpu = types.SimpleNamespace(
        Layout=real.Layout,
        CompilerParams=real.CompilerParams,
        LoweringSemantics=real.LoweringSemantics,
        load=lambda ref, layout=None, optimized=True: ref[...],
        layout_cast=lambda x, layout: x,
        broadcasted_iota=lambda dtype, shape, dim, layout=None: jax.lax.broadcasted_iota(dtype, shape, dim),
        SMEM=lambda shape, dtype, transforms=None: lambda: _blank(shape, dtype),
        RefUnion=lambda *groups: lambda: [[make() for make in group] for group in groups],
        Barrier=lambda num_arrivals=1, num_barriers=1: lambda: Barriers(num_arrivals, num_barriers),
        WGMMAAccumulatorRef=Accumulator,
        wgmma=_wgmma,
        kernel=_kernel,
        copy_gmem_to_smem=_copy,
        copy_smem_to_gmem=_copy,
        barrier_wait=lambda b: _one(b)[0].wait(_one(b)[1]),
        barrier_arrive=lambda b: _one(b)[0].arrive(_one(b)[1]),
        commit_smem=_nothing,
        wait_smem_to_gmem=_nothing,
        set_max_registers=_nothing,
    )
    pl = types.SimpleNamespace(
        ds=Slice,
        when=lambda condition: lambda body: body() if bool(condition) else None,
        loop=_loop,
        run_state=_run_state,
        run_scoped=lambda body, *made: body(*made),
    )
    return {"plgpu": plgpu, "pl": pl, "lax": _Lax()}


@contextmanager
def emulated(*modules):
    """Kernels of ``modules`` run on the CPU, eagerly (not under ``jit`` or ``grad``), while this lasts."""
    kept = [{name: getattr(m, name) for name in ("plgpu", "pl", "lax") if hasattr(m, name)} for m in modules]
    try:
        for module, names in zip(modules, kept, strict=True):
            stand_ins = _stand_ins(names["plgpu"])
            for name in names:
                setattr(module, name, stand_ins[name])
        yield
    finally:
        for module, names in zip(modules, kept, strict=True):
            for name, value in names.items():
                setattr(module, name, value)
