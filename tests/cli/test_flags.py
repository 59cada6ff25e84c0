"""Flags, YAML and presets become one config; what is wrong is named with the flag that sets it."""

import argparse
from typing import Literal

import pytest
from pydantic import BaseModel, Field

from harness_trainer.cli.flags import add_flags, resolve
from harness_trainer.config import RunConfig
from harness_trainer.errors import ConfigError


class Inner(BaseModel):
    max_steps: int = Field(4, ge=1, description="100% of the steps")
    sampling: dict[str, float] = Field(default_factory=dict)


class Box(BaseModel):
    type: Literal["local", "remote"] = "local"
    root: str | None = None


class Outer(BaseModel):
    model_config = {"extra": "forbid"}

    box: Box = Field(default_factory=Box)

    model: str = "smollm2"
    note: str | None = None
    inner: Inner = Field(default_factory=Inner)


def config(args=(), preset=None, file=None):
    parser = argparse.ArgumentParser()
    add_flags(parser, Outer, preset or {})
    parser.format_help()  # a stray % in a description would raise here
    return resolve(Outer, parser.parse_args(list(args)), preset or {}, file)


def test_flag_wins_over_file_and_file_over_preset(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: from-file\ninner: {max_steps: 7}\n")
    got = config(["--inner.max-steps", "9"], {"model": "from-preset", "note": "kept"}, file)
    assert (got.model, got.inner.max_steps, got.note) == ("from-file", 9, "kept")


def test_a_mapping_can_be_given_as_json():
    assert config(["--inner.sampling", '{"top_p": 0.9}']).inner.sampling == {"top_p": 0.9}


def test_text_that_looks_like_a_number_stays_text_where_text_is_wanted():
    assert config(["--model", "123"]).model == "123"


def test_json_that_is_none_is_named():
    with pytest.raises(ConfigError, match="not valid JSON"):
        config(["--inner.sampling", '{"top_p": }'])


@pytest.mark.parametrize("value", ["0", "many", "null"])
def test_a_bad_value_names_its_flag(value):
    with pytest.raises(ConfigError, match=r"--inner\.max-steps"):
        config(["--inner.max-steps", value])


@pytest.mark.parametrize(
    ("text", "says"), [("- a\n", "must be a mapping"), ("a: [", "not valid YAML"), ("modle: x", "modle")]
)
def test_a_bad_file_is_named(tmp_path, text, says):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        config(file=file)


def test_the_kind_of_a_part_is_the_parts_own_flag_and_its_fields_are_below_it(tmp_path):
    got = config(["--box", "remote", "--box.root", "/x"]).box
    assert (got.type, got.root) == ("remote", "/x")
    file = tmp_path / "run.yaml"
    file.write_text("box: remote\n")
    got = config(["--box.root", "/x"], file=file).box
    assert (got.type, got.root) == ("remote", "/x")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        config(file=tmp_path / "absent.yaml")


def test_the_preset_is_not_changed_by_flags():
    preset = {"inner": {"max_steps": 2}}
    config(["--inner.max-steps", "5"], preset)
    assert preset == {"inner": {"max_steps": 2}}


class Near(BaseModel):
    model_config = {"extra": "forbid"}

    type: Literal["near"] = "near"
    root: str | None = Field(None, description="a folder")
    size: int = Field(1, ge=1, description="how big")


class Far(BaseModel):
    model_config = {"extra": "forbid"}

    type: Literal["far"] = "far"
    region: str = Field("here", description="a place")
    size: int = Field(2, ge=1, description="how big")


class Chosen(BaseModel):
    model_config = {"extra": "forbid"}

    box: Near | Far = Field(default_factory=Near, discriminator="type", description="where it runs")
    names: list[str] | None = None
    words: list[str] = Field(default_factory=list)


def whole(*args, file=None, say=print):
    parser = argparse.ArgumentParser()
    add_flags(parser, Chosen, {})
    return resolve(Chosen, parser.parse_args(args), {"box": {"type": "near"}}, file, say=say)


def chosen(*args, file=None, say=print):
    return whole(*args, file=file, say=say).box


def test_a_part_of_several_kinds_is_chosen_by_its_flag_and_takes_the_fields_of_its_kind(tmp_path):
    assert chosen() == Near()
    assert chosen("--box", "far", "--box.region", "there", "--box.size", "5") == Far(region="there", size=5)
    file = tmp_path / "run.yaml"
    file.write_text("box: {type: far, region: there}\n")
    assert chosen(file=file) == Far(region="there")
    assert chosen("--box.size", "3", file=file) == Far(region="there", size=3)


@pytest.mark.parametrize(
    ("text", "left", "told"),
    [
        ("{type: near, root: null, size: 1}", Far(), ""),  # as --dry-run writes it: these are nobody's wish
        ("{type: near, root: null, size: 5}", Far(size=5), ""),
        ("{type: near, root: /x, size: 1}", Far(), "--box far has no box.root: passed over in"),
        ("{size: 1}", Far(size=1), ""),  # without a type it is meant for whichever is chosen
        ("near", Far(), ""),
    ],
)
def test_of_a_part_whose_kind_a_flag_changes_stays_what_somebody_set_and_the_new_kind_has(tmp_path, text, left, told):
    file, said = tmp_path / "run.yaml", []
    file.write_text(f"box: {text}\n")
    assert chosen("--box", "far", file=file, say=said.append) == left
    assert len(said) == bool(told) and told in "".join(said)


def test_a_field_that_the_file_gives_to_no_kind_is_still_refused(tmp_path):
    (tmp_path / "run.yaml").write_text("box: {root: /x}\n")
    with pytest.raises(ConfigError, match=r"box.root: box far has no such setting; choose --box near"):
        chosen("--box", "far", file=tmp_path / "run.yaml")


def test_a_list_of_texts_is_given_with_commas_or_as_json(tmp_path):
    assert whole("--names", "a, b,", "--words", "c").model_dump(exclude={"box"}) == {
        "names": ["a", "b"],
        "words": ["c"],
    }
    for unclear in ('--set={"a":1,"b":2}', "'a,b',c", "a[1,2]", '{"a": 1}', "", " ,"):
        with pytest.raises(ConfigError, match=r"^--words .*\["):
            whole(f"--words={unclear}")
    assert whole("--words", '["--set={1,2}"]').words == ["--set={1,2}"] and whole("--words", "[]").words == []
    assert whole("--names", '["a,b"]').names == ["a,b"] and whole("--names", "null").names is None


def test_what_is_wrong_in_a_list_or_a_mapping_names_the_flag_that_there_is(tmp_path):
    with pytest.raises(ConfigError, match=r"^names\.1: .* got 2; set it with --names or in the YAML$"):
        whole("--names", '["a", 2]')
    with pytest.raises(ConfigError, match=r"^inner\.sampling\.x: .*; set it with --inner\.sampling or in the YAML$"):
        config(["--inner.sampling", '{"x": "y"}'])
    (tmp_path / "run.yaml").write_text("inner: 3\n")
    with pytest.raises(ConfigError, match=r"^inner: .* got 3; set it in the YAML$"):
        config(file=tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=r"^inner must be a mapping of settings in the YAML, not 3$"):
        config(["--inner.max-steps", "2"], file=tmp_path / "run.yaml")


def test_a_setting_that_there_is_not_is_one_short_line_without_a_flag(tmp_path):
    (tmp_path / "run.yaml").write_text("modle: {many: words}\n")
    with pytest.raises(ConfigError, match=r"^modle: there is no such setting; --help lists those that there are$"):
        config(file=tmp_path / "run.yaml")


def test_help_says_whose_a_field_is_and_each_kinds_own_default():
    parser = argparse.ArgumentParser()
    add_flags(parser, Chosen, {})
    text = " ".join(parser.format_help().split())
    assert "where it runs: near, far (default: near)" in text
    assert "[far] a place (default: here)" in text
    assert "[near, far] how big (default: near: 1, far: 2)" in text


def test_a_field_of_another_kind_is_refused_and_the_right_kind_is_named():
    with pytest.raises(ConfigError, match=r"box near has no such setting; choose --box far"):
        chosen("--box.region", "there")


def test_a_wrong_value_or_kind_names_the_flag():
    with pytest.raises(ConfigError, match=r"set it with --box\.size"):
        chosen("--box", "far", "--box.size", "0")
    with pytest.raises(ConfigError, match=r"--box"):
        chosen("--box", "nowhere")


def test_settings_that_do_not_go_together_are_told_in_their_own_words():
    parser = argparse.ArgumentParser()
    add_flags(parser, RunConfig, {})
    given = parser.parse_args(["--learner.objective.loss", "gspo"])
    with pytest.raises(ConfigError, match=r"^learner\.objective: gspo.* set aggregation to rollout_mean$"):
        resolve(RunConfig, given, {}, None)
