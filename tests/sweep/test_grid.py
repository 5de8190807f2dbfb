"""Which cells a grid has, what makes them paired, and that a sweep is what it was."""

import pytest

from mhar_jax.errors import UserError
from mhar_jax.sweep.grid import are_paired, create, describe, make_cells, open_sweep


def cells(grid, *overrides):
    return make_cells("tiny", overrides, grid)


def test_every_combination_is_a_cell_with_its_values():
    found = cells({"model.variant": ["mhar", "delta"], "optimizer.peak_lr": ["5e-4", "1e-3"], "seed": ["1", "2"]})
    assert len(found) == 8
    assert found[0].name == "variant=mhar,peak_lr=0.0005,seed=1"
    assert found[-1].values == (("model.variant", "delta"), ("optimizer.peak_lr", 1e-3), ("seed", 2))
    assert found[-1].config.model.variant == "delta"
    assert found[-1].config.optimizer.peak_lr == 1e-3
    assert found[-1].config.seed == 2
    assert found[-1].group == (("model.variant", "delta"), ("optimizer.peak_lr", 1e-3))
    assert len({c.group for c in found}) == 4


def test_a_variant_without_a_field_is_one_cell():
    found = cells(
        {"model.variant": ["additive", "attention_residuals", "mhar"], "model.routing_heads": ["1", "2", "4"]}
    )
    assert [c.name for c in found] == [
        "variant=additive",
        "variant=attention_residuals",
        "variant=mhar,routing_heads=1",
        "variant=mhar,routing_heads=2",
        "variant=mhar,routing_heads=4",
    ]
    assert describe(found[0].values) == "variant=additive"


def test_pairs_see_the_same_data():
    a, b, c = (x.config for x in cells({"model.variant": ["mhar", "delta"], "seed": ["1", "2"]})[:3])
    assert not are_paired(a, b)  # another seed
    assert are_paired(a, c)  # another variant
    for override in ("batch_size=8", "seq_len=64", "steps=10", "data.held_out=0.1", "eval.every=50"):
        (other,) = cells({"seed": ["1"]}, override)
        assert not are_paired(a, other.config)


def test_a_sweep_is_found_again_and_no_other_takes_its_place(tmp_path):
    grid = {"model.variant": ["mhar", "additive"], "model.routing_heads": ["2"], "seed": ["1"]}
    made = create(tmp_path, cells(grid), grid)
    found = open_sweep(tmp_path)
    assert found == made
    assert create(tmp_path, cells(grid), grid) == made
    for other, overrides in (({**grid, "seed": ["2"]}, ()), (grid, ("steps=7",))):
        with pytest.raises(UserError, match="holds another sweep"):
            create(tmp_path, cells(other, *overrides), other)
    assert open_sweep(tmp_path) == made


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ({"model.nothing": ["1"]}, "unknown config field model.nothing"),
        ({"model.variant": ["mhar", "transformer"]}, "variant"),
        (
            {"model.routing_heads": ["3"]},
            "the cell model.routing_heads=3 cannot be: .*routing_heads must divide d_model",
        ),
        ({"seed": ["1", ""]}, "--grid.seed needs values separated by commas, got '1,'"),
        ({"run_dir": ["a"]}, "every cell has a run directory"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_written(grid, message):
    with pytest.raises(UserError, match=message):
        cells(grid)


def test_a_directory_without_a_sweep(tmp_path):
    with pytest.raises(UserError, match="holds no sweep"):
        open_sweep(tmp_path)
    (tmp_path / "sweep.yaml").write_text("grid: 3")
    with pytest.raises(UserError, match="cannot be read"):
        open_sweep(tmp_path)


def test_values_that_a_path_cannot_tell_apart_are_cells_of_their_own():
    cells = make_cells("tiny", [], {"sample.prompt": ["x y", "x_y", "x:y"]})
    assert len({cell.name for cell in cells}) == 3
    assert [dict(cell.values)["sample.prompt"] for cell in cells] == ["x y", "x_y", "x:y"]


def test_as_many_routing_heads_as_kv_heads_is_a_number():
    cells = make_cells("tiny", [], {"model.routing_heads": ["null", "1", "4"]})
    assert [dict(cell.values)["model.routing_heads"] for cell in cells] == [4, 1]  # 4 is what null means here
