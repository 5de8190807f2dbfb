"""From files and overrides to a config: what works, and one sentence for everything that does not."""

import dataclasses
import typing

import pytest
import yaml

from mhar_jax.config import Config, load_config, make_config, to_dict, to_yaml
from mhar_jax.config import schema as schema_module
from mhar_jax.config.load import MAY_CHANGE, describe_fields, differences, find_file, presets_directory
from mhar_jax.errors import UserError
from mhar_jax.training.main import help_text, parse


def refused(*overrides: str, file=None) -> str:
    """The one sentence."""
    with pytest.raises(UserError) as caught:
        load_config(file, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        # unknown fields, at every depth
        ("stepz=1", ["unknown config field stepz", "steps"]),
        ("model.layers=1", ["unknown config field model.layers", "num_layers"]),
        ("model.rope_scaling.f=1", ["unknown config field model.rope_scaling.f", "factor"]),
        ("a.b.c=1", ["unknown config field a", "run_dir"]),
        ("steps.x=1", ["steps is a plain value", "steps.x does not exist"]),
        ("model.d_model.x=1", ["model.d_model is a plain value"]),
        # wrong types
        ("steps=abc", ["steps", "integer", "'abc'"]),
        ("steps=1.5", ["steps", "integer", "1.5"]),
        ("steps=", ["steps", "None"]),
        ("steps=[1]", ["steps", "[1]"]),
        ("steps=true", ["steps must be int", "True"]),
        ("optimizer.peak_lr=fast", ["optimizer.peak_lr", "number", "'fast'"]),
        ("optimizer.peak_lr=yes", ["optimizer.peak_lr must be float", "True"]),
        ("model.tie_embeddings=maybe", ["model.tie_embeddings", "boolean"]),
        ("model=3", ["model has the fields", "plain value 3"]),
        ("model.rope_scaling=3", ["model.rope_scaling has the fields", "factor"]),
        ("log.profile_steps=3", ["log.profile_steps", "tuple"]),
        ("log.profile_steps=[3]", ["log.profile_steps"]),
        ("log.profile_steps=[1,true]", ["log.profile_steps", "True"]),
        ("steps=[1", ["steps cannot be read"]),
        # out of range
        ("steps=0", ["steps", "greater than 0"]),
        ("steps=3000000000", ["steps", "less than 2147483648"]),
        ("seed=-1", ["seed", "greater than or equal to 0"]),
        ("optimizer.peak_lr=nan", ["optimizer.peak_lr", "finite"]),
        ("optimizer.peak_lr=inf", ["optimizer.peak_lr", "finite"]),
        ("optimizer.beta1=1", ["optimizer.beta1", "less than 1"]),
        ("optimizer.decay_fraction=1.5", ["optimizer.decay_fraction"]),
        ("data.held_out=0", ["data.held_out", "greater than 0"]),
        ("model.variant=mharr", ["model.variant", "'mhar'", "'mharr'"]),
        ("log.profile_steps=[5,2]", ["profile_steps", "5, 2"]),
        ("run_dir=", ["run_dir", "at least 1"]),
        # fields that do not go together
        ("model.num_kv_heads=3", ["num_kv_heads must divide num_heads", "num_kv_heads=3"]),
        ("model.routing_heads=7", ["routing_heads must divide d_model", "routing_heads=7"]),
        ("model.d_model=12", ["num_heads must divide d_model"]),
        ("model.head_dim=7", ["head_dim must be even", "7"]),
        ("optimizer.accumulate=7", ["accumulate must divide batch_size", "accumulate=7"]),
        ("seq_len=4096", ["seq_len must not exceed model.context"]),
        ("mesh.data=0", ["mesh axes must be positive"]),
        ("mesh.fsdp=-1", ["at most one of them -1"]),
        ("mesh.fsdp=-2", ["mesh axes must be positive"]),
        ("model.rope_scaling={low_freq_factor: 4}", ["high_freq_factor must be above"]),
        # no override at all
        ("steps", ["--field=value", "'steps'"]),
        ("=3", ["--field=value"]),
        (".=3", ["unknown config field"]),
        ("model.=3", ["unknown config field model."]),
    ],
)
def test_bad_overrides(override, words):
    sentence = refused(override)
    for word in words:
        assert word in sentence


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.yaml", "steps: [", ["a.yaml cannot be read", "line 1"]),
        ("a.yaml", "- 1", ["must hold fields and values", "list"]),
        ("a.yaml", "only words", ["must hold fields and values", "str"]),
        ("a.yaml", "steps: 3\nsteps: 4", ["steps is given twice", "line 2"]),
        ("a.yaml", "model: {variant: mhar, variant: additive}", ["variant is given twice"]),
        ("a.yaml", "1: 2", ["unknown config field 1"]),
        ("a.yaml", "model:\n", ["model has the fields"]),
        ("a.yaml", "steps: yes", ["steps must be int", "True"]),
        ("a.yaml", "? [1]\n: 2", ["a.yaml cannot be read"]),
        ("a.yaml", "model: {routing_heads: 5}", ["routing_heads must divide"]),
        ("a.toml", "steps = ", ["a.toml cannot be read"]),
        ("a.toml", "steps = 3\nsteps = 4", ["a.toml cannot be read"]),
        ("a.toml", "[model]\nlayers = 3", ["unknown config field model.layers"]),
        ("a.toml", "steps = 2020-01-01", ["steps", "integer"]),
    ],
)
def test_bad_files(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_text(content)
    sentence = refused(file=path)
    for word in words:
        assert word in sentence


def test_files_that_are_not_text(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xff\xfe\x00")
    assert "a.yaml cannot be read" in refused(file=tmp_path / "a.yaml")
    for missing in (tmp_path, tmp_path / "no.yaml", "no-such-preset"):
        sentence = refused(file=missing)
        assert "does not exist" in sentence
        assert "tiny" in sentence


def test_yaml_and_toml_say_the_same(tmp_path):
    (tmp_path / "a.yaml").write_text("steps: 7\nmodel:\n  variant: delta_block\noptimizer: {peak_lr: 3e-4}\n")
    (tmp_path / "a.toml").write_text('steps = 7\nmodel.variant = "delta_block"\n[optimizer]\npeak_lr = 3e-4\n')
    a, b = load_config(tmp_path / "a.yaml"), load_config(tmp_path / "a.toml")
    assert a == b
    assert (a.steps, a.model.variant, a.optimizer.peak_lr) == (7, "delta_block", 3e-4)
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load_config(tmp_path / "empty.yaml") == Config() == load_config()


def test_overrides_apply_in_order_over_the_file(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("steps: 7\nmodel: {num_layers: 3}\n")
    config = load_config(path, ["steps=8", "--steps=9", "model.d_model=64", "optimizer.peak_lr=1e-4"])
    assert (config.steps, config.model.num_layers, config.model.d_model, config.optimizer.peak_lr) == (9, 3, 64, 1e-4)


@pytest.mark.parametrize(
    ("override", "get", "value"),
    [
        ("optimizer.clip_norm=null", lambda c: c.optimizer.clip_norm, None),
        ("optimizer.clip_norm=None", lambda c: c.optimizer.clip_norm, None),
        ("data.path=none", lambda c: c.data.path, None),
        ("data.path=7", lambda c: c.data.path, "7"),
        ("data.path=a=b", lambda c: c.data.path, "a=b"),
        ("sample.prompt=None", lambda c: c.sample.prompt, "None"),
        ("sample.prompt=yes: [", lambda c: c.sample.prompt, "yes: ["),
        ("sample.prompt=", lambda c: c.sample.prompt, ""),
        ("model.gate=false", lambda c: c.model.gate, False),
        ("log.profile_steps=[2,5]", lambda c: c.log.profile_steps, (2, 5)),
        ("model.rope_scaling.factor=4", lambda c: c.model.rope_scaling.factor, 4.0),
        ("model.rope_scaling={factor: 4}", lambda c: c.model.rope_scaling.factor, 4.0),
        ("model.rope_scaling=null", lambda c: c.model.rope_scaling, None),
        ("mesh.data=-1", lambda c: c.mesh.data, -1),
        ("optimizer.warmup_steps=2_000", lambda c: c.optimizer.warmup_steps, 2000),
        ("model.routing_implementation=xla", lambda c: c.model.routing_implementation, "xla"),
    ],
)
def test_good_overrides(override, get, value):
    got = get(load_config(None, [override]))
    assert got == value
    assert type(got) is type(value)


def test_a_config_survives_its_yaml():
    config = load_config(
        None,
        [
            "model.rope_scaling.factor=4",
            "log.profile_steps=[2,5]",
            "optimizer.eps=1e-12",
            "sample.prompt=a: 'b' \\ é\n- ",
        ],
    )
    text = to_yaml(config)
    assert make_config(yaml.safe_load(text)) == config
    assert make_config(to_dict(config)) == config
    assert hash(config) == hash(make_config(to_dict(config)))


def test_every_preset_is_a_config():
    presets = sorted(presets_directory().glob("*.yaml"))
    assert "tiny" in {p.stem for p in presets}
    for preset in presets:
        assert find_file(preset.stem) == preset
        config = load_config(preset.stem)
        assert make_config(yaml.safe_load(to_yaml(config))) == config


def test_what_may_change_between_a_checkpoint_and_its_continuation():
    saved = to_dict(Config())
    names = [f.name for f in describe_fields()]
    assert all(any(n == field or n.startswith(f"{field}.") for n in names) for field in MAY_CHANGE), "a stale name"
    assert differences(saved, Config()) == []
    free = ["steps=9", "run_dir=x", "mesh.fsdp=2", "eval.every=3", "log.every=3", "model.remat=layer", "data.path=x"]
    assert differences(saved, load_config(None, free)) == []
    fixed = ["seed=7", "batch_size=32", "model.num_layers=3", "model.rope_scaling.factor=2", "optimizer.ema=0.5"]
    found = differences(saved, load_config(None, fixed))
    assert "seed was 42 and is 7" in found
    assert "model.num_layers was 12 and is 3" in found
    assert any(entry.startswith("model.rope_scaling") for entry in found)
    assert len(found) >= len(fixed)


def test_every_field_is_explained():
    text = help_text()
    for f in describe_fields():
        assert f.text, f"{f.name} has no text"
        assert f"  --{f.name} {f.type} = {f.default}\n      {f.text}" in text
    by_name = {f.name: f for f in describe_fields()}
    assert by_name["model.variant"].type.split("|")[:3] == ["additive", "hyper_connections", "attention_residuals"]
    assert by_name["optimizer.clip_norm"].type == "float|None"
    assert by_name["data.path"].default == "None"
    assert "tuple" in by_name["log.profile_steps"].type


def test_help_lists_every_leaf_of_the_schema():
    def leaves(cls, prefix=""):
        for f in dataclasses.fields(cls):
            hint = typing.get_type_hints(cls)[f.name]
            if dataclasses.is_dataclass(hint):
                yield from leaves(hint, f"{prefix}{f.name}.")
            else:
                yield prefix + f.name

    assert [f.name for f in describe_fields()] == list(leaves(schema_module.Config))
    required = {"run_dir", "seed", "steps", "batch_size", "seq_len", "data.path", "data.tokenizer", "eval.every"}
    required |= {f"model.{n}" for n in ("variant", "num_layers", "d_model", "routing_heads")}
    assert required | {"optimizer.peak_lr", "checkpoint.every"} <= {f.name for f in describe_fields()}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ("tiny", [])),
        (["mhar_100m"], ("mhar_100m", [])),
        (["--config", "a.yaml", "--steps", "3"], ("a.yaml", ["steps=3"])),
        (["--config=a.yaml", "--steps=3"], ("a.yaml", ["steps=3"])),
        (["--mesh.data", "-1"], ("tiny", ["mesh.data=-1"])),
        (["--sample.prompt=--x"], ("tiny", ["sample.prompt=--x"])),
        (["--data.path", "a=b"], ("tiny", ["data.path=a=b"])),
    ],
)
def test_the_command_line(arguments, expected):
    assert parse(arguments) == expected


@pytest.mark.parametrize("arguments", [["a", "b"], ["--steps"], ["--steps", "--seed=1"], ["--config=a", "b"]])
def test_bad_command_lines(arguments):
    with pytest.raises(UserError):
        parse(arguments)
