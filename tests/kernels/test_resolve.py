"""Each op's implementation is named once, by the devices and the widths, and said aloud."""

import pytest
import tiny

from k3train.config.errors import UserError
from k3train.config.exit_codes import ExitCode
from k3train.kernels.config import KernelsConfig
from k3train.kernels.resolve import Place, resolve
from k3train.train.assembly import assemble


def chosen(asked: str, backend: str, width: int | None, **rest) -> tuple[str, int, str]:
    """The delta rule's implementation, its chunk, and the reason that is printed."""
    kernels, rows = resolve(
        KernelsConfig.model_validate({"kda": asked, "kda_chunk": 32}), Place(backend, kda_width=width, **rest)
    )
    (row,) = [row for row in rows if row[0] == "kda"]
    assert row[1] == kernels.kda
    return kernels.kda, kernels.kda_chunk, row[2]


@pytest.mark.parametrize("backend", ["cpu", "gpu", "tpu"])
def test_nothing_stays_auto(backend):
    kernels, rows = resolve(KernelsConfig(), Place(backend, kda_width=128))
    assert "auto" not in kernels.model_dump().values()
    assert [row[0] for row in rows] == ["kda", "attention", "grouped_matmul", "cross_entropy"]


def test_auto_takes_the_devices_own_kernel():
    assert chosen("auto", "tpu", 128) == ("mosaic_tpu", 64, "auto on tpu")
    assert chosen("auto", "cpu", 128) == ("chunked", 32, "auto on cpu")
    assert chosen("auto", "gpu", 128, device_kind="NVIDIA H200") == ("mosaic_gpu", 64, "auto on gpu")
    other = "auto on gpu: mosaic_gpu runs on Hopper gpu devices, and this run has NVIDIA B200 ones"
    assert chosen("auto", "gpu", 128, device_kind="NVIDIA B200") == ("chunked", 32, other)


@pytest.mark.parametrize(
    ("rest", "reason"),
    [
        ({"compute_dtype": "float32"}, "takes bfloat16, and train.compute_dtype is float32"),
        ({"context": 2}, "does not share out a row, and mesh.context is 2"),
    ],
)
def test_what_the_hopper_kernels_do_not_serve_is_computed_by_the_chunked_form_and_it_is_said(rest, reason):
    named, chunk, why = chosen("mosaic_gpu", "gpu", 128, device_kind="NVIDIA H100 80GB HBM3", **rest)
    assert (named, chunk, why) == ("chunked", 32, f"kernels.kda: mosaic_gpu {reason}")


def test_the_hopper_kernels_are_refused_on_other_gpus():
    with pytest.raises(UserError, match="mosaic_gpu runs on Hopper gpu devices, and this run has NVIDIA B200 ones"):
        chosen("mosaic_gpu", "gpu", 128, device_kind="NVIDIA B200")


@pytest.mark.parametrize("asked", ["auto", "mosaic_tpu"])
def test_other_widths_are_computed_by_the_chunked_form_and_it_is_said(asked):
    named, chunk, why = chosen(asked, "tpu", 64)
    assert (named, chunk) == ("chunked", 32)
    assert "mosaic_tpu serves heads of width 128, and model.kda.head_dim is 64" in why


def test_what_is_asked_for_is_taken():
    assert chosen("mosaic_tpu", "tpu", 128)[0] == "mosaic_tpu"
    assert chosen("mosaic_gpu", "gpu", 128, device_kind="NVIDIA H200") == ("mosaic_gpu", 64, "kernels.kda")
    for asked in ("chunked", "recurrent"):
        assert chosen(asked, "tpu", 128) == (asked, 32, "kernels.kda")


@pytest.mark.parametrize("backend", ["cpu", "gpu"])
def test_a_kernel_on_other_devices_is_refused(backend):
    with pytest.raises(UserError, match=f"mosaic_tpu runs on tpu devices, and this run has {backend} ones") as raised:
        chosen("mosaic_tpu", backend, 64)
    assert raised.value.exit_code is ExitCode.CONFIG


def test_a_run_is_refused_before_anything_is_built(tmp_path):
    with pytest.raises(UserError, match="mosaic_tpu runs on tpu devices"):
        assemble(tiny.experiment(tmp_path, kernels={"kda": "mosaic_tpu"}))


def test_attention_kernels_are_named_where_they_serve():
    """Asked for by name; other widths, dtypes and meshes are computed by the blockwise form, and it is said."""

    def row(asked, backend="gpu", **rest):
        rest = {"device_kind": "NVIDIA H200", "mla_widths": (128, 64, 128)} | rest
        kernels, rows = resolve(KernelsConfig.model_validate({"attention": asked}), Place(backend, **rest))
        assert kernels.attention == rows[1][1]
        return rows[1][1:]

    assert row("auto") == ("blockwise", "auto on gpu")
    assert row("mosaic_gpu") == row("mosaic_gpu", mla_widths=None) == ("mosaic_gpu", "kernels.attention")
    named, why = row("mosaic_gpu", mla_widths=(128, 64, 64))
    assert named == "blockwise" and "model.mla.qk_shared_head_dim 64, model.mla.v_head_dim 64" in why
    assert row("mosaic_gpu", compute_dtype="float32")[0] == row("mosaic_gpu", context=2)[0] == "blockwise"
    with pytest.raises(UserError, match="mosaic_gpu runs on gpu devices, and this run has cpu ones"):
        row("mosaic_gpu", "cpu")
