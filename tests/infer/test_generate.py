"""What prompts are read as, and the sampler at its edges."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.cli.main import main
from k3train.config.errors import UserError
from k3train.data.tokenizer import ByteTokenizer
from k3train.infer.generate import Generator
from k3train.infer.sampler import sample

LOGITS = jnp.asarray([[0.0, 3.0, 2.9, -1.0, 50.0]])


def generator(**options) -> Generator:
    """One that can only read."""
    return Generator(SimpleNamespace(specs=dict), ByteTokenizer(), jnp.float32, **options)


def test_prompts_begin_as_documents_of_the_training_did():
    assert generator().encode("aä").tolist() == [257, 97, 195, 164]
    assert generator(add_bos=False).encode("a").tolist() == [97]
    assert generator().encode("").tolist() == [257]


def test_prompts_there_is_nothing_to_read_of():
    with pytest.raises(UserError, match="nothing to go on from"):
        generator(add_bos=False).encode("")
    with pytest.raises(UserError, match="no Unicode text"):
        generator().encode("caf\udce9")  # what Python makes of an argument that is not UTF-8


@pytest.mark.parametrize(
    ("temperature", "top_p"), [(0.0, 0.9), (1e-46, 1.0), (1e-5, 1.0), (1.0, 1e-9), (1e6, 1e-9), (1e-46, 1e-46)]
)
def test_without_chance_the_likeliest_is_taken(temperature, top_p):
    """The last id is beyond the tokenizer's."""
    drawn = [int(sample(LOGITS, jax.random.key(seed), temperature, top_p, 4)[0]) for seed in range(20)]
    assert drawn == [1] * 20


def test_every_token_is_drawn_where_nothing_is_cut_off():
    many = jnp.tile(LOGITS, (4000, 1))
    drawn = np.bincount(np.asarray(sample(many, jax.random.key(0), 1.0, 1.0, 4)), minlength=5) / 4000
    np.testing.assert_allclose(drawn, [*np.asarray(jax.nn.softmax(LOGITS[0, :4])), 0], atol=0.03)


@pytest.mark.parametrize(
    "option",
    [
        ("--tokens", "0"), ("--tokens", "99999999999"), ("--seed", "-1"), ("--seed", "99999999999999999999"),
        ("--temperature", "-1"), ("--temperature", "nan"), ("--temperature", "inf"), ("--top-p", "0"), ("--top-p", "2"),
    ],
)  # fmt: skip
def test_options_out_of_range(option, capsys):
    assert main(["generate", "runs/none", "text", *option]) == 2
    assert option[0] in capsys.readouterr().err
