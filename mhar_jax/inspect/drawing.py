"""Maps drawn in a process of their own, while a run trains.

Matplotlib holds Python's lock nearly all of the time that it draws, half a second of a processor or more. Drawn in a
thread, a map would make every step that is dispatched meanwhile wait for the lock.
"""

import atexit
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Sequence

import numpy as np

from mhar_jax.errors import UserError, writing
from mhar_jax.inspect.maps import Panel, draw_maps

# The process knows the caller's modules, and none of what the caller's main module does.
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from mhar_jax.inspect.drawing import serve; serve()"


@dataclasses.dataclass(frozen=True)
class MapFile:
    """A picture of maps and where it belongs; see `draw_maps`."""

    path: pathlib.Path
    what: str  # names it in an error
    panels: Sequence[Panel]
    columns: Sequence[str]
    title: str
    caption: str
    label: str
    limit: float

    def to_line(self) -> bytes:
        """As a line of JSON."""
        panels = [
            {"title": p.title, "values": np.asarray(p.values).tolist(), "rows": list(p.rows)} for p in self.panels
        ]
        values = {**vars(self), "path": str(self.path), "panels": panels, "columns": list(self.columns)}
        return json.dumps(values).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> "MapFile":
        """What `to_line` made."""
        values = json.loads(line)
        panels = [Panel(p["title"], np.array(p["values"]), p["rows"]) for p in values["panels"]]
        return cls(**{**values, "path": pathlib.Path(values["path"]), "panels": panels})

    def write(self, *, unless_orphaned_by: int | None = None) -> None:
        """Draws it. The file is replaced whole, so a viewer never sees half of it.

        Args:
          unless_orphaned_by: write nothing if this process's parent is no longer the one with this id.

        Raises:
          UserError: the file cannot be written.
        """
        figure = draw_maps(
            self.panels, self.columns, title=self.title, caption=self.caption, label=self.label, limit=self.limit
        )
        aside = self.path.with_name(f".{self.path.name}")  # the same suffix: it decides the format
        if unless_orphaned_by not in (None, os.getppid()):
            return
        with writing(self.what, self.path):
            figure.savefig(aside, metadata={"Software": None})
            aside.replace(self.path)


class Drawer:
    """The process that draws: started by the first picture, ended when this one ends, however it does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def draw(self, picture: MapFile) -> None:
        """Returns when it is drawn. Python's lock is free meanwhile.

        Raises:
          UserError: the file cannot be written.
        """
        with self._lock:
            try:
                failure = self._ask(picture)
            except (OSError, EOFError):  # it could not be started, or was killed: draw here
                self._end()
                picture.write()
                return
        if failure is not None:
            raise UserError(failure)

    def close(self) -> None:
        """Ends the process; the next picture starts another."""
        with self._lock:
            self._end()

    def _ask(self, picture: MapFile) -> str | None:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt from the keyboard is the caller's
            )
        given, answers = self._process.stdin, self._process.stdout
        assert given is not None
        assert answers is not None
        given.write(picture.to_line())
        given.flush()
        if not (answer := answers.readline()):
            raise EOFError
        return json.loads(answer)

    def _end(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # what a dead process did not read
                if pipe is not None:
                    pipe.close()
        process.wait()


@functools.cache
def drawer() -> Drawer:
    """The one of this process."""
    found = Drawer()
    atexit.register(found.close)
    return found


def serve() -> None:
    """The process: pictures from standard input until it ends, an answer to each: None, or what went wrong."""
    given, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    parent = os.getppid()
    for line in given:
        failure = None
        try:
            MapFile.from_line(line).write(unless_orphaned_by=parent)
        except UserError as error:
            failure = str(error)
        answers.write(json.dumps(failure).encode() + b"\n")
        answers.flush()
