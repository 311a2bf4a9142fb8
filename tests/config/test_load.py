"""Checked experiments: provenance, messages, cross-section rules."""

import json
import re

import jsonschema
import pytest
from pydantic import TypeAdapter, ValidationError

from k3train.config.compose import compose
from k3train.config.errors import UserError
from k3train.config.fingerprint import fingerprint
from k3train.config.load import load
from k3train.config.schema import json_schema, keys
from k3train.config.section import Count
from k3train.config.show import lines
from k3train.config.yaml_reader import read_text
from k3train.experiment import Experiment

EXPERIMENT = """\
extends: {model}
run:
  dir: runs/x
data:
  store: data/x
  sequence_length: 256
train:
  global_batch: 8
  steps: 10
kernels:
  kda_chunk: 32
"""


@pytest.fixture
def experiment(root, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(EXPERIMENT.format(model=root / "configs/model/k3_tiny.yaml"))
    return path


def faults(path, *overrides) -> str:
    with pytest.raises(UserError) as caught:
        load(path, overrides, Experiment)
    assert caught.value.exit_code == 30
    return str(caught.value)


def test_values_and_their_provenance(experiment):
    loaded = load(experiment, ["optim.muon.lr=0.02", "model.mtp.mixer=kda"], Experiment)
    assert loaded.experiment.optim.muon.lr == 0.02
    assert loaded.experiment.model.mtp.mixer == "kda"
    p = loaded.provenance
    assert p["optim.muon.lr"] == "command line"
    assert p["optim.muon.momentum"] == "default"
    assert p["train.steps"] == f"{experiment}:9"
    assert re.search(r"k3_tiny.yaml:\d+$", p["model.hidden_size"])
    assert re.search(r"/k3.yaml:\d+$", p["model.norm_eps"])


def test_unknown_keys_name_the_place_and_the_nearest_names(experiment):
    experiment.write_text(experiment.read_text() + "optim:\n  moun: {lr: 1}\n  lr: 3\ncolour: red\n")
    text = faults(experiment, "model.num_experts=7")
    assert "model.num_experts: unknown key; did you mean model.moe.num_experts" in text
    assert f"{experiment}:13: optim.moun: unknown key; did you mean optim.muon?" in text
    assert f"{experiment}:14: optim.lr: unknown key; did you mean optim.muon.lr or optim.adamw.lr" in text
    assert f"{experiment}:15: colour: unknown key; an experiment takes run, model" in text
    assert "4 faults" in text


@pytest.mark.parametrize(("override", "message"), [
    ("train.steps=3e4", "train.steps: expected a whole number, got 30000.0; write 30000"),
    ("train.steps=many", "expected a whole number, got the text 'many'"),
    ("train.steps=-1", "input should be greater than 0, got -1"),
    ("data.add_bos=yes", "expected true or false, got the text 'yes'; write true"),
    ("optim.schedule.kind=linear", "expected 'cosine', 'wsd' or 'constant', got the text 'linear'"),
    ("optim.adamw.lr=fast", "expected a number, got the text 'fast'"),
    ("optim.adamw.lr=.nan", "input should be a finite number"),
    ("run.seed=99999999999999999999", "should be less than or equal to 9223372036854775807"),
    ("train.global_batch=9223372036854775808", "should be less than or equal to 9223372036854775807"),
    ("run.dir=''", "run.dir: '' is no path; name a file or folder"),
    ('data.store="a\\0b"', "data.store: .* is no path"),
    ("run.dir=~nobody-of-that-name/x", "no such user's home folder"),
    ("run.dir=3", "run.dir: expected text, got 3"),
    ("model.layers=3", "model.layers: expected a section"),
    ("optim=null", "optim: expected a section .a map of keys., got nothing .null.; leave the key out"),
    ("model.layers.kda=3", "expected a list, got 3"),
    ("model.layers.kda=[1, x]", "model.layers.kda.1: expected a whole number"),
    ("train.tokens=1.5", "train.tokens: 1.5 is not a whole number"),
    ("train.tokens=1Mi", "train: train takes either steps or tokens"),
    ("model.layers.count=6", r"must name each of the 6 layers once; in neither list: \[6\]"),
])  # fmt: skip
def test_wrong_values_say_what_was_expected(experiment, override, message):
    text = faults(experiment, override)
    assert re.search(message, text), text
    assert "command line" in text or str(experiment) in text


def test_missing_keys_name_their_section(experiment):
    experiment.write_text(experiment.read_text().replace("  dir: runs/x\n", "  seed: 1\n").replace("  steps: 10\n", ""))
    text = faults(experiment)
    assert f"{experiment}:2: run.dir: required, but section run does not give it" in text
    assert "train takes either steps or tokens" in text


@pytest.mark.parametrize(("overrides", "keys_named"), [
    (["model.kda=null"], ["model.kda", "model.layers.kda"]),
    (["model.mla=null"], ["model.mla", "model.layers.mla"]),
    (["model.ffn=null"], ["model.ffn", "model.layers.first_dense"]),
    (["model.moe=null"], ["model.moe", "model.layers.first_dense"]),
    (["model.moe=null", "model.layers.first_dense=9", "model.mtp.ffn=moe"], ["model.mtp.ffn", "model.moe"]),
    (["model.moe.top_k=17"], ["model.moe.top_k", "model.moe.num_experts"]),
    (["model.moe.top_k=16"], ["model.moe.top_k", "optim.balance.kind"]),
    (["model.moe.router.groups=3"], ["model.moe.router.groups", "model.moe.num_experts"]),
    (["model.moe.router.groups=4", "model.moe.router.groups_used=5"], ["model.moe.router.groups_used"]),
    (["model.moe.router.groups=16", "model.moe.router.groups_used=8"], ["model.moe.router.groups"]),
    (["model.moe.router.groups=8"], ["model.moe.top_k", "model.moe.router.groups_used"]),
    (["model.attn_residual.block_size=12"], ["model.attn_residual.block_size", "model.layers.count"]),
    (["model.kda.gate_lower_bound=0"], ["model.kda.gate_lower_bound"]),
    (["data.sequence_length=16"], ["data.sequence_length", "kernels.kda_chunk"]),
    (["model.vocab_size=256"], ["model.vocab_size", "data.tokenizer.kind"]),
    (["mesh.fsdp=16"], ["train.global_batch", "mesh.fsdp"]),
    (["train.accumulation=4", "mesh.replica=4"], ["train.global_batch", "train.accumulation", "mesh.replica"]),
    (["mesh.fsdp=3", "train.global_batch=9"], ["mesh.fsdp", "model.hidden_size"]),
    (["train.steps=", "train.tokens=1000"], ["train.tokens", "train.global_batch"]),
    (["train.curriculum=[{tokens: 0, sequence_length: 100}]"], ["train.curriculum", "data.sequence_length"]),
    (["train.curriculum=[{tokens: 0, sequence_length: 16}]"], ["train.curriculum", "kernels.kda_chunk"]),
    (["train.curriculum=[{tokens: 0}, {tokens: 1}, {tokens: 2}]"], ["train.curriculum"]),
    (["train.curriculum=[{tokens: 0, global_batch: 4}]", "mesh.replica=8"], ["train.curriculum", "mesh.replica"]),
    (["train.curriculum=[{tokens: 0, sequence_length: 64}]", "mesh.context=64", "mesh.replica=1"],
     ["train.curriculum", "mesh.context"]),
    (["eval.every=5", "data.holdout=0"], ["eval.every", "data.holdout"]),
    (["data.holdout=1"], ["data.holdout"]),
    (["sample.every=5"], ["sample.every", "sample.prompts"]),
    (["sample.top_p=0"], ["sample.top_p"]),
    (["sample.temperature=-1"], ["sample.temperature"]),
    (["run.resume=yes"], ["run.resume"]),
    (["run.resume=must", "run.init_from=runs/y"], ["run.init_from", "run.resume"]),
    (["optim.adamw.b2=1"], ["optim.adamw.b2"]),
    (["metrics.profile_steps=[3]"], ["metrics.profile_steps"]),
])  # fmt: skip
def test_rules_name_the_keys_and_the_fix(experiment, overrides, keys_named):
    text = faults(experiment, *overrides)
    for key in keys_named:
        assert re.search(rf"\b{re.escape(key)} \(", text), text
    assert "    fix: " in text
    assert "1 fault " in text


@pytest.mark.parametrize(("stages", "words"), [
    ("[{tokens: 5}]", "the first stage begins at tokens: 0, not 5"),
    ("[{tokens: 0}, {tokens: 1B}, {tokens: 1B}]", "train.curriculum[2].tokens: 1000000000 is not after the"),
    ("[{tokens: 0, global_batch: 3, accumulation: 2}]", "train.curriculum[0]: 2 microbatches (accumulation) must"),
    ("[{tokens: 0, length: 3}]", "train.curriculum.0.length: unknown key; train.curriculum.0 takes tokens"),
])  # fmt: skip
def test_stages_of_a_curriculum(experiment, stages, words):
    assert words in faults(experiment, f"train.curriculum={stages}")


def test_several_broken_rules_are_told_at_once(experiment):
    assert "2 faults" in faults(experiment, "data.sequence_length=16", "sample.every=5")


@pytest.mark.parametrize("overrides", [
    ["kernels.kda=recurrent", "data.sequence_length=16"],
    ["model.attn_residual.kind=none", "model.attn_residual.block_size=12"],
    ["model.moe.router.groups=4", "model.moe.router.groups_used=2"],
    ["model.moe.top_k=16", "optim.balance.kind=none"],
    ["run.resume=runs/y@100"],
    ["run.init_from=runs/y"],
    ["train.steps=", "train.tokens=1Mi"],
    ["mesh.fsdp=4", "mesh.replica=2"],
])  # fmt: skip
def test_what_can_run_is_let_through(experiment, overrides):
    load(experiment, overrides, Experiment)


@pytest.mark.parametrize(("text", "number"), [
    (7, 7), ("12", 12), ("2.0B", 2 * 10**9), ("256Ki", 256 * 1024), ("100M", 10**8), ("1.5K", 1500), (1e9, 10**9),
    ("15T", 15 * 10**12), ("0.5Ki", 512), ("1.1B", 1_100_000_000),
])  # fmt: skip
def test_counts(text, number):
    assert TypeAdapter(Count).validate_python(text) == number


@pytest.mark.parametrize("text", ["1.0001K", "B", "2 B", "-3K", "0K", 1.5, "1e3", "3kb", True, None])
def test_no_counts(text):
    with pytest.raises(ValidationError):
        TypeAdapter(Count).validate_python(text, strict=True)


def test_shown_yaml_loads_as_the_same_experiment(experiment, tmp_path):
    odd = ["run.dir=no", "sample.prompts=['# x', '1e3', 'a: b', ' lead', 'naïve \"q\"', '']", "sample.every=1"]
    loaded = load(experiment, odd, Experiment)
    rows = lines(loaded.experiment.model_dump(), loaded.provenance)
    again = tmp_path / "again.yaml"
    again.write_text("\n".join(f"{text}  # {origin}" if origin else text for text, origin in rows))
    assert load(again, [], Experiment).experiment == loaded.experiment


def test_json_schema_accepts_the_shipped_pieces(root):
    schema = json_schema(Experiment)
    jsonschema.Draft202012Validator.check_schema(schema)
    for path in sorted((root / "configs/model").glob("*.yaml")):
        jsonschema.validate(read_text(path.read_text(), path.name).plain(), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"model": {"hiden_size": 3}}, schema)
    assert schema["$defs"]["TrainConfig"]["properties"]["global_batch"]["description"]


def test_keys_reach_every_section():
    assert {"model.moe.router.scale", "optim.muon.lr", "model.mtp.mixer", "data.source.files"} <= set(keys(Experiment))


def test_fingerprint_sees_values_and_not_their_order():
    one = fingerprint({"a": {"x": 1, "y": [1.5, None]}, "b": "ü"})
    assert one == fingerprint({"b": "ü", "a": {"y": [1.5, None], "x": 1}})
    assert one != fingerprint({"a": {"x": 2, "y": [1.5, None]}, "b": "ü"})
    assert re.fullmatch("[0-9a-f]{64}", one)
    with pytest.raises(ValueError, match="JSON"):
        fingerprint({"a": float("nan")})


def test_tiny_differs_from_k3_in_numbers_only(root):
    def shape(value):
        if isinstance(value, dict):
            return {key: shape(item) for key, item in value.items()}
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return "number" if number else ["numbers"] if isinstance(value, list) else value

    k3, tiny = (compose(root / f"configs/model/{name}.yaml").plain() for name in ("k3", "k3_tiny"))
    assert shape(k3) == shape(tiny)
    assert json.dumps(k3) != json.dumps(tiny)
