"""Parameter and FLOP counts against the published totals and the benchmark models' own figures."""

from types import SimpleNamespace

import pytest

from k3train.config.compose import compose
from k3train.models.config import ModelConfig
from k3train.models.counts import counts, flops_per_token

# Published checkpoint elements of the two releases (text only).
CHECKPOINT = {"k3": 2_779_484_478_208, "kimi_linear_48b": 49_122_681_728}

# Figures of the models that other frameworks are compared on; totals are without the router bias.
MINI = SimpleNamespace(
    total=3_334_728_408,
    active=1_055_648_472,
    matmul=954_372_096,
    kda_state=38_928_384,
    per_token_of_length=23_040,
    training={4096: 6_126_133_248, 8192: 6_409_248_768, 65536: 10_372_866_048},
)
DENSE = SimpleNamespace(
    total=1_161_897_432,
    active=1_161_897_432,
    matmul=1_060_638_720,
    kda_state=38_928_384,
    per_token_of_length=23_040,
    training={4096: 6_763_732_992, 8192: 7_046_848_512, 65536: 11_010_465_792},
)


def model(root, name, *overrides) -> ModelConfig:
    return ModelConfig.model_validate(compose(root / f"configs/model/{name}.yaml", overrides).plain()["model"])


@pytest.mark.parametrize("name", CHECKPOINT)
def test_checkpoint_elements_of_the_releases(root, name):
    c = counts(model(root, name))
    print(f"{name}: {c.total:,} trainable + {c.router_bias:,} router bias + {c.a_log_padding:,} A_log padding")
    assert c.checkpoint == CHECKPOINT[name]


def test_k3_by_kind_equals_the_published_breakdown(root):
    c = counts(model(root, "k3"))
    assert c.trainable["experts"] == 2_722_740_830_208
    assert c.trainable["latent"] == 4_726_980_608
    assert c.trainable["shared"] == 12_155_092_992
    assert c.trainable["router"] == 590_872_576
    assert c.trainable["dense_ffn"] == 726_663_168
    assert c.trainable["norms"] + c.trainable["attn_residual"] == 4_021_248 + 329_728
    assert (c.router_bias, c.a_log_padding) == (82_432, 69 * 32)
    # 103,015,209,728 active without embedding and head, router bias and padding counted.
    assert c.active - 2 * c.trainable["head"] + c.router_bias + c.a_log_padding == 103_015_209_728


@pytest.mark.parametrize(("name", "expected"), [("k3_mini", MINI), ("k3_dense", DENSE)])
def test_benchmark_models(root, name, expected):
    m = model(root, name)
    c = counts(m)
    assert c.total == expected.total
    assert c.active == expected.active
    assert sum(c.active_matmul.values()) == expected.matmul
    for length, training in expected.training.items():
        flops = flops_per_token(m, length)
        assert flops.training == training
        assert flops.by_kind["kda_state"] == expected.kda_state
        assert flops.by_kind["attention"] == expected.per_token_of_length * length


def test_tied_head_is_multiplied_but_not_counted_twice(root):
    free, tied = (counts(model(root, "k3_tiny", f"model.tie_embeddings={flag}")) for flag in ("false", "true"))
    assert free.total - tied.total == 320 * 128
    assert free.active_matmul == tied.active_matmul


def test_prediction_layer_adds_its_layer_entry_and_exit(root):
    without = model(root, "k3_tiny")
    with_mtp = model(root, "k3_tiny", "model.mtp.mixer=mla", "model.mtp.ffn=dense")
    d = without.hidden_size
    expected = 2 * d * d + 3 * d + 6 * d + 2 * d + without.mla.parameters(d) + without.ffn.parameters(d)
    assert counts(with_mtp).total - counts(without).total == expected
    assert counts(with_mtp).trainable["mtp"] == expected
