"""What a sweep is: a config and, for some of its fields, a list of values. Each combination is a cell.

At one seed, cells that differ only in the model or the optimizer see the same batches in the same order, which is what
makes their difference a paired one.
"""

import dataclasses
import hashlib
import itertools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import yaml

from mhar_jax.config import Config
from mhar_jax.config.load import load_config, to_yaml
from mhar_jax.config.schema import DELTA_VARIANTS, ROUTED_VARIANTS, Variant
from mhar_jax.errors import UserError, writing

SEED = "seed"
DATA_FIELDS = ("data", "batch_size", "seq_len", "steps", "eval")  # what must agree for two cells to be paired
_ALL = get_args(Variant)
# Fields that some variants do not have: a grid over one counts such a variant once.
_ONLY_IN: dict[str, Sequence[str]] = {
    "model.routing_heads": [v for v in ROUTED_VARIANTS if v != "attention_residuals"],
    "model.num_blocks": ["block_mhar", "delta_block"],
    "model.null_source": DELTA_VARIANTS,
    "model.gate": DELTA_VARIANTS,
    "model.hyper_streams": ["hyper_connections"],
}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a sweep."""

    name: str  # of its directory
    values: tuple[tuple[str, Any], ...]  # grid field and value, in the order of the grid; None: the variant has none
    config: Config  # run_dir is set when it runs

    @property
    def group(self) -> tuple[tuple[str, Any], ...]:
        """The values without the seed: cells of a group are repetitions."""
        return tuple((name, value) for name, value in self.values if name != SEED)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A directory of cells."""

    directory: pathlib.Path
    grid: dict[str, list[str]]
    cells: list[Cell]

    def path(self, cell: Cell) -> pathlib.Path:
        """The run directory of a cell."""
        return self.directory / "cells" / cell.name


def make_cells(file: str | None, overrides: Sequence[str], grid: Mapping[str, Sequence[str]]) -> list[Cell]:
    """Every combination of the grid's values, without repetitions of variants that lack a field.

    Raises:
      UserError: a field or value that does not exist, a combination that cannot be, or a field with no values.
    """
    for name, listed in grid.items():
        if not listed or any(not v for v in listed):
            raise UserError(f"--grid.{name} needs values separated by commas, got {','.join(listed)!r}")
        if name == "run_dir":
            raise UserError("--grid.run_dir: every cell has a run directory of its own already")
    cells: dict[str, Cell] = {}
    for combination in itertools.product(*grid.values()):
        chosen: dict[str, str | None] = dict(zip(grid, combination, strict=True))
        plain = load_config(file, [*overrides, *(f"{k}={v}" for k, v in chosen.items() if k not in _ONLY_IN)])
        for name in chosen.keys() & _ONLY_IN.keys():
            if plain.model.variant not in _ONLY_IN[name]:
                chosen[name] = None
        try:
            config = load_config(file, [*overrides, *(f"{k}={v}" for k, v in chosen.items() if v is not None)])
        except UserError as error:
            where = ", ".join(f"{k}={v}" for k, v in chosen.items() if v is not None)
            raise UserError(f"the cell {where} cannot be: {error}") from None
        values = tuple((field, None if v is None else _value(config, field)) for field, v in chosen.items())
        directory = _cell_name(values)
        if directory in cells and cells[directory].values != values:  # names differ only in what a path cannot hold
            directory = f"{directory}-{_digest(values)}"
        cells.setdefault(directory, Cell(directory, values, config))
    return list(cells.values())


def _value(config: Config, field: str) -> Any:
    """What a cell of a grid has: the number of routing heads where the config says `null` for as many as KV heads."""
    value = field_value(config, field)
    return config.model.heads_of_depth if field == "model.routing_heads" and value is None else value


def field_value(config: Config, name: str) -> Any:
    """The value of a dotted field."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def short_names(names: Sequence[str]) -> dict[str, str]:
    """Each dotted name's last part, where that is not ambiguous."""
    last = [name.rpartition(".")[2] for name in names]
    return {name: part if last.count(part) == 1 else name for name, part in zip(names, last, strict=True)}


def describe(values: Sequence[tuple[str, Any]]) -> str:
    """ "variant=mhar, routing_heads=4", without what a variant does not have."""
    short = short_names([name for name, _ in values])
    return ", ".join(f"{short[name]}={value}" for name, value in values if value is not None) or "the config itself"


def create(directory: pathlib.Path, cells: list[Cell], grid: Mapping[str, Sequence[str]]) -> Sweep:
    """Writes the sweep, or finds the same one there.

    Raises:
      UserError: another sweep is there, or the directory cannot be written.
    """
    sweep = Sweep(directory, {k: list(v) for k, v in grid.items()}, cells)
    wanted = {"grid": sweep.grid, "cells": {cell.name: _values(cell) for cell in cells}}
    spec = directory / "sweep.yaml"
    if spec.is_file():
        before = open_sweep(directory)
        same = before.grid == sweep.grid and [(c.name, c.config) for c in before.cells] == [
            (c.name, c.config) for c in cells
        ]
        if not same:
            raise UserError(
                f"{directory} holds another sweep (its grid: {_grid_text(before.grid)}); "
                "continue it without further arguments, or use another directory"
            )
        return before
    with writing("the sweep", directory):
        for cell in cells:
            sweep.path(cell).mkdir(parents=True, exist_ok=True)
            (sweep.path(cell) / "cell.yaml").write_text(to_yaml(cell.config), encoding="utf-8")
        aside = directory / "sweep.yaml.tmp"
        aside.write_text(yaml.safe_dump(wanted, sort_keys=False), encoding="utf-8")
        aside.replace(spec)  # last: a sweep that is there is whole
    return sweep


def open_sweep(directory: pathlib.Path) -> Sweep:
    """The sweep of a directory.

    Raises:
      UserError: there is none.
    """
    spec = directory / "sweep.yaml"
    if not spec.is_file():
        raise UserError(f"{directory} holds no sweep (no sweep.yaml); start one with --grid.FIELD=VALUE,VALUE")
    try:
        found = yaml.safe_load(spec.read_text(encoding="utf-8"))
        grid, names = dict(found["grid"]), dict(found["cells"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"{spec} cannot be read: {' '.join(str(error).split())}") from None
    cells = [
        Cell(name, tuple(values.items()), load_config(directory / "cells" / name / "cell.yaml"))
        for name, values in names.items()
    ]
    return Sweep(directory, grid, cells)


def are_paired(a: Config, b: Config) -> bool:
    """Whether two runs see the same batches and are evaluated on the same text at the same steps."""
    return a.seed == b.seed and all(getattr(a, name) == getattr(b, name) for name in DATA_FIELDS)


def _values(cell: Cell) -> dict[str, Any]:
    return dict(cell.values)


def _cell_name(values: Sequence[tuple[str, Any]]) -> str:
    name = re.sub(r"[^\w=.,+-]", "_", describe(values).replace(", ", ","))
    if len(name) > 120:
        name = f"{name[:100]}-{_digest(values)}"
    return name


def _digest(values: Sequence[tuple[str, Any]]) -> str:
    return hashlib.blake2b(repr(values).encode(), digest_size=6).hexdigest()


def _grid_text(grid: Mapping[str, Sequence[str]]) -> str:
    return "; ".join(f"{name}={','.join(values)}" for name, values in grid.items())
