"""Files that are wrong on purpose: one clear sentence, exit code 2, and nothing left on disk."""

import json
import math
import os
import random
import shutil
import struct

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mhar_jax import load_model
from mhar_jax.errors import UserError
from mhar_jax.huggingface.config import model_config
from mhar_jax.huggingface.safetensors import read_header


@pytest.fixture
def hf(tools, tmp_path):
    """A copy of tiny-qwen3 to spoil."""
    return shutil.copytree(tools.fixtures / "tiny-qwen3", tmp_path / "hf", ignore=shutil.ignore_patterns("expected*"))


@pytest.fixture
def refused(run, hf, tmp_path):
    """Imports the spoiled directory: what the one sentence says, after seeing that nothing was written."""

    def look(*words):
        sentence = run("import", hf, tmp_path / "out").one_sentence()
        assert [p.name for p in tmp_path.iterdir()] == ["hf"]
        for word in words:
            assert word in sentence, sentence
        with pytest.raises(UserError):
            load_model(hf)

    return look


def header_of(file):
    (length,) = struct.unpack("<Q", file.read_bytes()[:8])
    return json.loads(file.read_bytes()[8 : 8 + length])


def rewrite(file, edit, *, prefix=None, keep=None):
    """Writes the file again with an edited header (a dict, or bytes), another length in front, or cut off."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = edit(json.loads(content[8 : 8 + length]))
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    whole = struct.pack("<Q", len(text) if prefix is None else prefix) + text + content[8 + length :]
    file.write_bytes(whole[:keep])


def edited(name, **fields):
    return lambda header: {**header, name: {**header[name], **fields}}


NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize("size", [0, 5])
def test_no_length(hf, refused, size):
    (hf / "model.safetensors").write_bytes(b"\1" * size)
    refused("must begin with 8 bytes", f"has only {size}")


def test_truncated_header(hf, refused):
    file = hf / "model.safetensors"
    rewrite(file, lambda h: h, keep=200)
    refused("model.safetensors is cut off", "and 192 follow")


def test_truncated_data(hf, refused):
    file = hf / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    refused("past the end of the file")


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 10**9])
def test_a_header_of_impossible_length(hf, refused, length):
    rewrite(hf / "model.safetensors", lambda h: h, prefix=length)
    refused("at most 100000000 bytes", str(length))


def test_a_header_of_impossible_length_in_a_sparse_file(hf, refused):
    """A file that really is that long: it is refused before the header is read."""
    file = hf / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(struct.pack("<Q", 2**36))
        opened.truncate(2**37)
    refused("at most 100000000 bytes")


def test_overlapping_offsets(hf, refused):
    file = hf / "model.safetensors"
    header = header_of(file)
    a, b = (header[f"model.layers.{i}.input_layernorm.weight"]["data_offsets"] for i in (0, 1))
    assert a != b
    rewrite(file, edited("model.layers.1.input_layernorm.weight", data_offsets=a))
    refused("model.layers.1.input_layernorm.weight", "overlap", "model.layers.0.input_layernorm.weight")


def test_bytes_of_nothing(hf, refused):
    file = hf / "model.safetensors"
    rewrite(file, lambda h: {k: v for k, v in h.items() if k != NORM})
    refused("belong to nothing")


@pytest.mark.parametrize("offsets", [[0, 2**62], [2**62, 2**62 + 256], [10**9, 10**9 + 256]])
def test_offsets_past_the_end(hf, refused, offsets):
    rewrite(hf / "model.safetensors", edited(NORM, data_offsets=offsets))
    refused(NORM, "past the end of the file")


@pytest.mark.parametrize("offsets", [[256, 0], [-256, 0], [0.0, 256.0], ["0", "256"], [0], None, [True, 256]])
def test_offsets_that_are_none(hf, refused, offsets):
    rewrite(hf / "model.safetensors", edited(NORM, data_offsets=offsets))
    refused(NORM)


@pytest.mark.parametrize("dtype", ["I64", "F8_E4M3", "F64", "banana", 7, None, ["F32"]])
def test_wrong_dtypes(hf, refused, dtype):
    rewrite(hf / "model.safetensors", edited(NORM, dtype=dtype))
    refused(NORM, "must have dtype F32, BF16, F16", repr(dtype))


def test_a_dtype_of_another_size(hf, refused):
    rewrite(hf / "model.safetensors", edited(NORM, dtype="BF16"))
    refused(NORM, "has 256 bytes", "needs 128")


@pytest.mark.parametrize("shape", [[2**40, 2**40], [-64], [64.0], "64", [None], [2**63]])
def test_wrong_shapes(hf, refused, shape):
    rewrite(hf / "model.safetensors", edited(NORM, shape=shape))
    refused(NORM)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ([2**62] * 200_000, "must have at most 16 dimensions, got 200000"),
        ([2**62] * 16, "more than the"),
        ([1] * 17, "must have at most 16 dimensions, got 17"),
    ],
    ids=["long", "large", "ones"],
)
def test_shapes_that_would_take_for_ever(hf, refused, shape, words):
    rewrite(hf / "model.safetensors", edited(NORM, shape=shape))
    refused(NORM, words)


def test_many_names_and_one_twice(hf, refused):
    names = ", ".join(f'"{i}": 0' for i in range(100_000))
    rewrite(hf / "model.safetensors", lambda _: f'{{{names}, "99999": 1}}'.encode())
    refused("the name '99999' is there twice")


@pytest.mark.parametrize(
    "text", [b"{", b"[]", b"7", b"\xff\xfe", b'{"a": ' * 50_000, b'{"a": 1, "a": 2}', b'{"a": []}']
)
def test_headers_that_are_none(hf, refused, text):
    rewrite(hf / "model.safetensors", lambda _: text)
    refused("model.safetensors")


@pytest.fixture
def shards(hf):
    """The same tensors in two shards with an index."""
    tensors = load_file(hf / "model.safetensors")
    (hf / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({n: tensors[n] for n in members}, hf / file)
    index = {"weight_map": {n: file for file, members in parts.items() for n in members}}
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    return index, tensors


def test_shards_are_read(shards, hf, tools, run, tmp_path):
    assert run("import", hf, tmp_path / "out").code == 0
    tools.assert_same(tools.read(tmp_path / "out"), tools.read(tools.fixtures / "tiny-qwen3"))


def test_a_file_that_the_index_does_not_name(shards, hf, refused):
    """An older or newer save beside it: stock code would read model.safetensors, and the index says otherwise."""
    save_file(shards[1], hf / "model.safetensors")
    refused("holds model.safetensors, which model.safetensors.index.json does not name")


def test_a_shard_beside_a_single_file(hf, refused):
    for i in (1, 2):
        shutil.copyfile(hf / "model.safetensors", hf / f"model-0000{i}-of-00002.safetensors")
    refused("holds model-00001-of-00002.safetensors and 1 more, beside model.safetensors")


def test_a_missing_shard(shards, hf, refused):
    (hf / "b.safetensors").unlink()
    refused("names the shard b.safetensors, which is not there")


def test_a_tensor_in_two_shards(shards, hf, refused):
    index, tensors = shards
    save_file(
        {n: tensors[n] for n, file in index["weight_map"].items() if file[0] == "b"} | {NORM: tensors[NORM]},
        hf / "b.safetensors",
    )
    assert index["weight_map"][NORM] == "a.safetensors"
    refused(NORM, "in two files, a.safetensors and b.safetensors")


@pytest.mark.parametrize("file", ["../a.safetensors", "..", ".", "/etc/passwd", "sub/a.safetensors", "a\0b", ""])
def test_an_index_that_leaves_its_directory(shards, hf, refused, tmp_path, file):
    index, _ = shards
    index["weight_map"][NORM] = file
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    refused("model.safetensors.index.json")


@pytest.mark.parametrize("index", [[], {}, {"weight_map": 3}, {"weight_map": {NORM: 7}}, {"weight_map": []}])
def test_an_index_that_is_none(hf, refused, index):
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    refused("model.safetensors.index.json")


def test_a_shard_of_an_impossible_name(shards, hf, refused):
    index, _ = shards
    index["weight_map"][NORM] = 300 * "x"
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    refused("names the shard xxx", "which is not there")


@pytest.mark.parametrize("file", ["model.safetensors.index.json", "config.json"])
def test_a_json_file_larger_than_memory(hf, refused, file):
    with (hf / file).open("r+b" if (hf / file).exists() else "wb") as opened:
        opened.truncate(500 * 10**9)  # sparse: it takes no disk
    refused(file, "must have at most 100000000 bytes, and has 500000000000")


def test_paths_that_cannot_be(hf, run, tmp_path):
    long = tmp_path / ("x" * 300)
    assert "File name too long" in run("import", hf, long).one_sentence()
    assert "File name too long" in run("import", long, tmp_path / "out").one_sentence()
    assert "must be UTF-8" in run("import", hf, os.fsdecode(bytes(tmp_path) + b"/out\xff")).one_sentence()
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_an_index_that_disagrees(shards, hf, refused):
    index, _ = shards
    index["weight_map"][NORM] = "b.safetensors"
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    refused("does not agree with its shards", NORM)


def test_nan_is_warned_about_and_named(hf, run, tools, tmp_path):
    tensors = load_file(hf / "model.safetensors")
    tensors[NORM][3] = np.nan
    tensors[EMBEDDING][2, 5] = np.inf
    save_file(tensors, hf / "model.safetensors")
    outcome = run("import", hf, tmp_path / "out")
    assert outcome.code == 0
    assert outcome.err.count("\n") == 1
    assert outcome.err.startswith("warning: infinities or NaN in 2 tensors: ")
    assert NORM in outcome.err
    assert EMBEDDING in outcome.err
    assert np.isnan(tools.read(tmp_path / "out")["final_norm",][3])
    for outcome in (
        run("export", hf, tmp_path / "exported", "--dtype=float16"),
        run("graft", hf, tmp_path / "graft", "--sample-tokens=8", "--num-blocks=2"),
    ):
        assert outcome.code == 0
        assert outcome.err.count("\n") == 1
        assert outcome.err.startswith("warning: infinities or NaN in 2 tensors: ")
        assert NORM in outcome.err
        assert EMBEDDING in outcome.err
        assert "largest logit deviation in float32: nan" in outcome.out or "rounding changed values" in outcome.out


def test_the_guilty_row_of_a_stacked_parameter_is_named(tools, run, tmp_path):
    """Also by import and graft, which write all rows of routing parameters as one array."""
    source = tmp_path / "hf"
    shutil.copytree(tools.fixtures / "tiny-delta-block-llama", source, ignore=shutil.ignore_patterns("expected*"))
    tensors = load_file(source / "model.safetensors")
    guilty, large = "model.layers.2.mlp_res_norm.weight", "model.layers.1.attn_res_proj.weight"
    tensors[guilty][3] = np.nan
    tensors[large][0, 2] = 3.4e38  # finite, and beyond bfloat16
    save_file(tensors, source / "model.safetensors")
    nan = f"warning: infinities or NaN in 1 tensor: {guilty}\n"
    assert run("import", source, tmp_path / "out").err == nan
    outcome = run("import", source, tmp_path / "narrow", "--param-dtype=bfloat16")
    assert outcome.err == f"{nan}warning: values beyond bfloat16 became infinite in 1 tensor: {large}\n"


def test_what_float16_cannot_hold_is_warned_about_and_named(hf, run, tmp_path):
    tensors = load_file(hf / "model.safetensors")
    tensors[NORM][3] = 1e6
    save_file(tensors, hf / "model.safetensors")
    outcome = run("export", hf, tmp_path / "out", "--dtype=float16")
    assert outcome.code == 0
    assert outcome.err == f"warning: values beyond float16 became infinite in 1 tensor: {NORM}\n"
    assert "inf" not in outcome.out
    assert np.isinf(load_file(tmp_path / "out" / "model.safetensors")[NORM][3])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 128}, ["must have shape", "by its config"]),
        ({"num_hidden_layers": 2}, ["no place for", "model.layers.2"]),
        ({"num_hidden_layers": 5}, ["misses tensors", "model.layers."]),
        ({"num_hidden_layers": 900}, ["says that there are 900 layers, and has 35 tensors"]),
        ({"num_hidden_layers": 10**9}, ["num_layers", "less than or equal to 1000"]),
        ({"vocab_size": 2**31 - 1}, ["model.embed_tokens.weight must have shape"]),
        ({"vocab_size": 10**30}, ["vocab_size"]),
        ({"num_key_value_heads": 1}, ["k_proj.weight must have shape"]),
        ({"num_key_value_heads": 3}, ["num_kv_heads must divide num_heads"]),
        ({"hidden_size": "wide"}, ["hidden_size must be a whole number", "got 'wide'"]),
        ({"tie_word_embeddings": False}, ["misses tensors: lm_head.weight"]),
        ({"model_type": "llama"}, ["no place for", "q_norm"]),
        ({"rms_norm_eps": -1.0}, ["norm_eps"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types must be", "got 'sliding_attention'"]),
        ({"use_sliding_window": True}, ["use_sliding_window must be False"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config must be left out", "'bits': 4"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor must be 1, got 0.5"]),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, ["partial_rotary_factor must be 1"]),
        ({"auto_map": {"AutoModel": "code.Model"}, "model_type": "custom"}, ["model_type must be one of"]),
    ],
)
def test_configs_that_disagree(hf, refused, changes, words):
    described = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(described | changes))
    refused(*words)


FIELDS = [
    "model_type",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "use_sliding_window",
    "layer_types",
    "partial_rotary_factor",
    "vocab_size",
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "rms_norm_eps",
    "initializer_range",
    "rope_parameters",
    "attnres_mode",
    "attnres_num_heads",
    "attnres_num_blocks",
    "attnres_gate_type",
    "attnres_use_null_source",
]
SCALING = ("rope_type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor")


@pytest.fixture(scope="module")
def described(tools):
    """A config.json with every field that is looked at."""
    routed, scaled = (
        json.loads((tools.fixtures / n / "config.json").read_text()) for n in ("tiny-delta-block-llama", "tiny-llama31")
    )
    return routed | {"rope_parameters": scaled["rope_parameters"]}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("value", ["x", [], {"a": [1]}, math.nan, -1, 10**400], ids=repr)
def test_a_field_of_a_wrong_type_is_named(described, field, value):
    if field == "rope_parameters" and isinstance(value, dict):
        value = [value]  # an object would be the right type
    if field == "layer_types" and value == []:
        value = [value]
    with pytest.raises(UserError, match=rf"^config.json: {field} must be .*, got ") as refused:
        model_config({**described, field: value})
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize("field", [*SCALING, "original_max_position_embeddings"])
@pytest.mark.parametrize("value", ["x", [], {"a": [1]}, math.nan, 0, True], ids=repr)
def test_a_field_of_rope_parameters_of_a_wrong_type_is_named(described, field, value):
    with pytest.raises(UserError, match=rf"^config.json: {field} must be .*, got "):
        model_config(described | {"rope_parameters": described["rope_parameters"] | {field: value}})


def test_rope_sections_that_are_none(described):
    older = {k: v for k, v in described.items() if k != "rope_parameters"}
    for value in ("linear", [2.0], 3, True):
        with pytest.raises(UserError, match="rope_scaling must be a JSON object, got "):
            model_config(older | {"rope_scaling": value})
    layered = {"full_attention": described["rope_parameters"]}
    with pytest.raises(UserError, match="rope_parameters must be one description for all layers, got "):
        model_config(described | {"rope_parameters": layered})
    crossed = described["rope_parameters"] | {"high_freq_factor": 0.5}
    with pytest.raises(UserError, match=r"rope_scaling cannot be used: .*high_freq_factor must be above"):
        model_config(older | {"rope_scaling": crossed})


def test_rope_sections_that_disagree(described):
    """Stock code takes rope_scaling where both are there: neither may be passed over."""
    both = described["rope_parameters"]
    assert model_config(described | {"rope_scaling": both}) == model_config(described)
    for other in ({"type": "linear", "factor": 2.0}, both | {"factor": 2.0}, {"rope_type": "default"}):
        with pytest.raises(UserError, match=r"^config.json: (rope_parameters|type) must be "):
            model_config(described | {"rope_scaling": other})


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_configs_that_are_none(hf, refused, text):
    (hf / "config.json").write_text(text)
    refused("config.json")


def test_pickles_are_not_looked_at(hf, refused):
    (hf / "model.safetensors").rename(hf / "pytorch_model.bin")
    refused("must hold model.safetensors")


def test_the_reader_and_the_package_agree(tools):
    """On what is well formed: names, shapes and where the bytes are."""
    for name in ("tiny-qwen3", "tiny-llama31"):
        file = tools.fixtures / name / "model.safetensors"
        theirs = load_file(file)
        ours = read_header(file)
        assert {n: e.shape for n, e in ours.items()} == {n: t.shape for n, t in theirs.items()}
        content = file.read_bytes()
        assert all(content[e.offset : e.offset + e.nbytes] == theirs[n].tobytes() for n, e in ours.items())


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_random_damage(hf, run, tmp_path, file):
    """Bytes changed, put in or cut off at random: refused in one sentence or, where it does not matter, imported."""
    given, draw, codes = (hf / file).read_bytes(), random.Random(0), []
    for _ in range(40):
        damaged = bytearray(given)
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(min(len(damaged), 5000))  # mostly in the header
            kind = draw.choice(("change", "insert", "cut"))
            if kind == "change":
                damaged[place] = draw.randrange(256)
            elif kind == "insert":
                damaged[place:place] = bytes([draw.choice(b'0123456789-"{}[],:ae')])
            else:
                del damaged[-place:]
        (hf / file).write_bytes(damaged)
        outcome = run("import", hf, tmp_path / "out")
        codes.append(outcome.code)
        if outcome.code:
            outcome.one_sentence()
            assert [p.name for p in tmp_path.iterdir()] == ["hf"]
        else:
            shutil.rmtree(tmp_path / "out")
    assert codes.count(2) > 30
