"""Data sets of the harness's own tasks from JSON lines on disk, so that its task files run as they are without the hub.

A data set of the hub is known by its name and, mostly, a configuration; a task file says both (`dataset_path`,
`dataset_name`) and which splits it reads. On disk that is DIR/NAME/CONFIGURATION/SPLIT.jsonl, a JSON object a line with
the columns of the published data set. docs/evaluation.md lists the files and columns of the tasks we checked.
"""

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import datasets

from mhar_jax.errors import UserError, one_line


class _Splits(datasets.DatasetDict):
    """Splits by name; one that is not there is named with its file."""

    folder: pathlib.Path

    def __missing__(self, split: Any) -> Any:
        raise UserError(f"the task reads {self.folder / str(split)}.jsonl, and there is no such file")


def read_data_set(folder: pathlib.Path, load: Callable[..., Any] = datasets.load_dataset) -> datasets.DatasetDict:
    """Every split that `folder` has a file of.

    Read through `load_dataset`, not from memory: what a task computes from its items once (GPQA shuffles the choices)
    is then cached beside them, and scoring sees the items that were asked.

    Raises:
      UserError: no file, or one that is not JSON lines.
    """
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise UserError(f"there is no data set in {folder}; it should hold a file SPLIT.jsonl for each split")
    found = _Splits()
    found.folder = folder
    for file in files:
        if not file.stat().st_size:
            raise UserError(f"{file} is empty; it should hold a JSON object a line, one for each item")
        try:
            found[file.stem] = load("json", data_files={file.stem: str(file)}, split=file.stem)
        except Exception as error:  # of the loader, of pyarrow or of the JSON parser
            cause = error.__cause__ or error
            raise UserError(f"{file} cannot be read as JSON lines with the same columns: {one_line(cause)}") from None
    return found


@contextlib.contextmanager
def local_data_sets(directory: str | pathlib.Path | None) -> Iterator[None]:
    """Within, `datasets.load_dataset` finds what it is asked for under `directory`; None: nothing changes.

    Task files that name files of their own (`data_files`) read those.

    Raises:
      UserError: the directory does not exist.
    """
    if directory is None:
        yield
        return
    root = pathlib.Path(directory)
    if not root.is_dir():
        raise UserError(f"the directory {root} of the tasks' data does not exist")
    load = datasets.load_dataset

    def stand_in(path: str, name: str | None = None, **options: Any) -> Any:
        if "data_files" in options:
            return load(path, name, **options)
        return read_data_set(root / path / (name or ""), load)

    bars = not datasets.utils.are_progress_bars_disabled()
    datasets.utils.disable_progress_bars()  # of reading files that are here
    datasets.load_dataset = stand_in
    try:
        yield
    finally:
        datasets.load_dataset = load
        if bars:
            datasets.utils.enable_progress_bars()


@contextlib.contextmanager
def no_network(wanted: bool) -> Iterator[None]:
    """Within, if wanted, the hub's packages fetch nothing; what their caches hold is still found.

    Their environment variables are read when they are imported, which may be long ago.
    """
    from evaluate import config as evaluate_config
    from huggingface_hub import constants

    places = (
        (constants, "HF_HUB_OFFLINE"),
        (datasets.config, "HF_HUB_OFFLINE"),
        (datasets.config, "HF_DATASETS_OFFLINE"),
        (evaluate_config, "HF_EVALUATE_OFFLINE"),
    )
    before = [getattr(*place) for place in places]
    if wanted:
        for module, name in places:
            setattr(module, name, True)
    try:
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)
