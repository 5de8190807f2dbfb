"""HumanEval's and MBPP's score, pass@k, without the hub: programs that a model wrote, run and counted.

The harness's task files fetch `code_eval` from the hub when they are loaded. Here is the same measure after its source
(arXiv 2107.03374, section 2.1), so that a task from local files needs no network and gives one figure everywhere.
"""

import contextlib
import math
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from mhar_jax.errors import UserError

SECONDS = 3.0  # processor time of one program, as in the paper
_WAITS = 4  # times as long by the clock: a busy machine is not the program's fault, sleep and deadlock are
_BYTES = 4 << 30  # of address space
# The last line is reached only by a program that neither failed nor ended the process.
_RUNNER = """
import resource, sys
program, passed, word, seconds, size = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_CPU, (int(seconds),) * 2)
resource.setrlimit(resource.RLIMIT_AS, (int(size),) * 2)
with open(program, encoding="utf-8") as file:
    text = file.read()
exec(compile(text, "program", "exec"), {})
with open(passed, "w") as file:
    file.write(word)
"""


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """Unbiased chance that one of k samples is right, of `samples` with `correct` right ones (eq. 1 of the paper)."""
    if samples - correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(samples - correct + 1, samples + 1))


def passes(program: str, seconds: float = SECONDS) -> bool:
    """Whether a program runs to its end without an error, in a process and an empty directory of its own.

    A limit on time and memory is no sandbox: it may read, write and send what this user may.
    """
    word = secrets.token_hex()
    with tempfile.TemporaryDirectory(prefix="program-", ignore_cleanup_errors=True) as place:
        source, passed, work = (pathlib.Path(place) / name for name in ("program.py", "passed", "work"))
        work.mkdir()
        source.write_text(program, encoding="utf-8", errors="replace")
        limits = [str(math.ceil(seconds)), str(_BYTES)]
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _RUNNER, str(source), str(passed), word, *limits],
            cwd=work,
            env={"PATH": os.defpath, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            process.wait(_WAITS * seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with whatever it started
            process.wait()
        return passed.is_file() and passed.read_text(encoding="utf-8", errors="replace") == word


class CodeEval:
    """What the harness's tasks use of `evaluate.load("code_eval")`."""

    def __init__(self, allow_code: bool):
        self._allow_code = allow_code

    def compute(
        self,
        *,
        references: Sequence[str],
        predictions: Sequence[Sequence[str]],
        k: Sequence[int] = (1,),
        timeout: float = SECONDS,
    ) -> tuple[dict[str, float], dict[int, list[bool]]]:
        """pass@k as {"pass@1": ...}, and for each problem which of its programs passed.

        Args:
          references: the tests of each problem.
          predictions: the programs of each problem.
          k: those above the smallest number of programs are left out.
          timeout: seconds of processor time a program.

        Raises:
          UserError: running programs was not allowed.
        """
        if not self._allow_code:
            raise UserError(
                "the task's metric code_eval runs programs that the model wrote; give --allow-code, in a sandbox of "
                "your own"
            )
        found = {
            number: [passes(f"{program}\n{tests}", timeout) for program in programs]
            for number, (programs, tests) in enumerate(zip(predictions, references, strict=True))
        }
        counted = [n for n in k if all(len(results) >= n for results in found.values())]
        means = {
            f"pass@{n}": math.fsum(pass_at_k(len(r), sum(r), n) for r in found.values()) / max(len(found), 1)
            for n in counted
        }
        return means, found


@contextlib.contextmanager
def local_code_eval(allow_code: bool) -> Iterator[None]:
    """Within, `evaluate.load("code_eval")` gives `CodeEval` and fetches nothing."""
    import evaluate

    load = evaluate.load

    def stand_in(path: str, *args: Any, **options: Any) -> Any:
        return CodeEval(allow_code) if path == "code_eval" else load(path, *args, **options)

    evaluate.load = stand_in
    try:
        yield
    finally:
        evaluate.load = load
