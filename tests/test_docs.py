"""The documentation is true to the code: links, commands, options, config keys, file and metric names, the key page."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from k3train.cli import main as cli
from k3train.config.compose import compose, merge
from k3train.config.reference import markdown
from k3train.config.schema import keys, section_at
from k3train.config.show import literal
from k3train.config.yaml_reader import Node, read_text
from k3train.experiment import Experiment
from k3train.metrics.names import find

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md"])
KEYS = set(keys(Experiment))
SECTIONS = {key for key in KEYS if "." not in key}
SHELL, YAML = ("sh", "console"), "yaml"
NUMBERS = ("STEP", "K", "N")  # stand for a number in a synopsis
METRIC_FAMILIES = ("train", "guard", "eval", "moe", "attn", "kda", "attnres", "perf", "data")
ROOMS = ("k3train", "tests", "scripts", "configs", "docs", "models", "kernels", "optim", "data", "train", "checkpoint",
         "run", "metrics", "parallel", "infer", "convert", "cli", "config")  # fmt: skip
FILES = re.compile(r"\.(jsonl?|yaml|md|py|txt|bin|lock|png|gz)$")

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def fences(text: str) -> list[tuple[str, str]]:
    """(language, content) of every fenced block; an indented block is a shell's where it calls k3train."""
    found = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = re.findall(r"^    (\S.*)$", outside, re.MULTILINE)
    return found + [("sh", line) for line in lines if re.match(r"(\S+/)?k3train |[A-Z_]+=\S* \S*k3train ", line)]


def prose(text: str) -> str:
    """The text without fenced and indented blocks."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^    \S.*$", "", text, flags=re.MULTILINE)


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


@every_page
def test_links_lead_somewhere(page: Path):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE) if anchor and file.is_file() else []
        if not file.exists() or (anchor and anchor not in map(slug, headings)):
            broken.append(target)
    assert not broken


CALL = re.compile(r"(\$ )?([A-Z0-9_]+=\S* )*(\S+/)?k3train ")


def command_lines(text: str) -> list[list[str]]:
    """Words of every call of k3train in a shell block; prompt, environment, pipes and `` [OPTIONAL]`` are cut."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        if not CALL.match(line):
            continue
        words = shlex.split(re.sub(r" \[[^\]]*\]", "", line), comments=True)
        while words[0] == "$" or "=" in words[0]:
            words = words[1:]
        end = next((i for i, word in enumerate(words) if re.match(r"\||&&|;|\d?>", word)), len(words))
        found.append(["1" if word in NUMBERS else word for word in words[1:end]])
    return found


def parser_of(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"k3train {command}")
    cli._module(command).add_arguments(parser)
    return parser


@every_page
def test_commands_parse_and_name_real_keys(page: Path):
    shell = [words for kind, text in fences(page.read_text()) if kind in SHELL for words in command_lines(text)]
    inline = re.findall(r"`((?:scripts/)?k3train [a-z]+(?: [^`]*)?)`", page.read_text())
    for words in shell:
        if words[0].startswith("-"):
            assert words[0] in ("--help", "--version"), words
            continue
        assert words[0] in cli.COMMANDS, words
        if "--help" in words:
            continue
        try:
            args = parser_of(words[0]).parse_args(words[1:])
        except SystemExit:
            pytest.fail(f"k3train does not take {' '.join(words)}")
        wrong = [text for text in getattr(args, "overrides", ()) if text.partition("=")[0] not in KEYS]
        assert not wrong, f"{words}: no such key: {wrong}"
    wrong = [text for text in inline if shlex.split(text)[1] not in cli.COMMANDS]
    assert not wrong, f"no such command: {wrong}"


@every_page
def test_yaml_blocks_are_valid_over_the_quick_start(page: Path):
    base = compose(ROOT / "configs/experiments/quickstart.yaml")
    for kind, text in fences(page.read_text()):
        if kind != YAML:
            continue
        fragment = read_text(text, page.name)
        assert isinstance(fragment.value, dict), text
        own = Node({key: node for key, node in fragment.value.items() if key != "extends"}, page.name)
        for key in ("steps", "tokens"):  # a run has one budget
            train = own.value.get("train", Node({}, "")).value
            if key in train:
                base.value["train"].value.pop({"steps": "tokens", "tokens": "steps"}[key], None)
        Experiment.model_validate(merge(base, own).plain())


@every_page
def test_names_in_the_text_exist(page: Path):
    """Config keys, files of the repository and metrics that stand in inline code."""
    wrong = []
    for code in re.findall(r"`([^`\n]+)`", prose(page.read_text())):
        word = code.split("=")[0].split(":")[0].strip()
        if re.fullmatch(r"[a-z_]+(\.[a-z0-9_]+)+", word) and word.split(".")[0] in SECTIONS:
            if word not in KEYS and not FILES.search(word):
                wrong.append(code)
        elif re.fullmatch(r"[a-z_]+(/[A-Za-z0-9_.<>{}-]+)+/?", word) and word.split("/")[0] in ROOMS + METRIC_FAMILIES:
            exists = (ROOT / word).exists() or (ROOT / "k3train" / word).exists()
            if not exists and find(re.sub(r"_worst$", "", word)) is None and "<" not in word:
                wrong.append(code)
    assert not wrong


def default_of(key: str) -> str:
    """The default of a dotted key, as the key page writes it."""
    *parents, name = key.split(".")
    section = section_at(Experiment, parents)
    assert section is not None
    field = section.model_fields[name]
    return "required" if field.is_required() else f"`{literal(field.default)}`"


@every_page
def test_tables_give_the_right_defaults(page: Path):
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \| (`[^`]*`|required) \|", page.read_text(), re.MULTILINE)
    assert not [(key, shown, default_of(key)) for key, shown in rows if key in KEYS and shown != default_of(key)]


def test_every_page_is_in_the_index():
    index = (DOCS / "README.md").read_text()
    named = {(DOCS / target.partition("#")[0]).resolve() for target in re.findall(r"\]\(([^)\s]+)\)", index)}
    missing = [str(p.relative_to(DOCS)) for p in PAGES if p not in (DOCS / "README.md", ROOT / "README.md")
               and p.resolve() not in named]  # fmt: skip
    assert not missing


def test_the_key_page_equals_the_schema():
    assert (DOCS / "config.md").read_text() == markdown(Experiment) + "\n", (
        "k3train config schema --markdown > docs/config.md"
    )


def test_every_key_is_documented():
    text = "\n".join(page.read_text() for page in PAGES)
    assert not [key for key in KEYS if f"`{key}`" not in text and f"## {key}" not in text]


def test_every_key_says_what_it_means():
    silent = re.findall(r"^\| (`[a-z0-9_.]+`) \|.*\|  \| \w+ \|$", markdown(Experiment), re.MULTILINE)
    assert not silent, f"give these a docstring in their config.py: {silent}"
