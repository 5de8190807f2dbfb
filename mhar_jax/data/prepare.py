"""Tokenises a corpus once into ArrayRecord shards; the layout is described in `shards`."""

import contextlib
import itertools
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from mhar_jax.data.corpus import encode_documents, token_dtype
from mhar_jax.data.readers import Documents, open_documents
from mhar_jax.data.shards import (
    FORMAT_VERSION,
    HASHES_NAME,
    LENGTHS_NAME,
    WRITER_OPTIONS,
    PreparedIndex,
    Shard,
    load_index,
)
from mhar_jax.data.tokenizers import HuggingFaceTokenizer, Tokenizer
from mhar_jax.errors import UserError

_SHARD_BYTES = 256_000_000  # of text, where the number of shards is not given


@dataclass(frozen=True)
class _Task:
    """A shard to write."""

    directory: Path
    file: str
    start: int  # first document
    stop: int


@dataclass(frozen=True)
class _Job:
    """What every shard has in common; handed to a worker process once."""

    documents: Documents
    tokenizer: Tokenizer
    progress: Any  # documents done, a shared counter


def prepare(
    *,
    path: str | None,
    out: str,
    tokenizer: Tokenizer,
    file_format: str = "auto",
    text_field: str = "text",
    shards: int | None = None,
    workers: int = 1,
) -> PreparedIndex:
    """Writes the directory `out`, whole or not at all.

    Everything is written into a hidden directory beside it, which is renamed at the end.

    Args:
      path: text to read, as `data.path`.
      out: directory to make; it may exist if it is empty.
      tokenizer: its tokenizer.json is copied too.
      file_format, text_field: as `data.format` and `data.text_field`.
      shards: files to write, of about equally many documents; None: one for each 256 MB of text.
      workers: processes that tokenise, a shard each.

    Raises:
      UserError: bad input, `out` not empty, or it cannot be written.
    """
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"--out: {out} exists and is not empty; remove it or give another directory")
    documents = open_documents(path, file_format, text_field)
    if shards is None:
        shards = -(-documents.num_bytes // _SHARD_BYTES)
    shards = max(1, min(shards, len(documents)))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{target.name}-", suffix=".partial", dir=target.parent))
    except OSError as error:
        raise UserError(f"--out: cannot write beside {out} ({error.strerror})") from error
    try:
        index = _write(partial, documents, tokenizer, shards, workers)
        partial.chmod(0o755)
        os.replace(partial, target)  # also over an empty directory
    except OSError as error:
        raise UserError(f"--out: cannot write {out} ({error.strerror or error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return index


def _write(directory: Path, documents: Documents, tokenizer: Tokenizer, count: int, workers: int) -> PreparedIndex:
    bounds = [len(documents) * shard // count for shard in range(count + 1)]
    tasks = [
        _Task(directory, f"tokens-{shard:05d}-of-{count:05d}.array_record", start, stop)
        for shard, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]
    results = []
    with tqdm(total=len(documents), unit=" documents", unit_scale=True, disable=None) as bar:
        for result in _run(tasks, documents, tokenizer, min(workers, count), bar):
            results.append(result)
    shards = tuple(shard for shard, _, _ in results)
    np.save(directory / LENGTHS_NAME, np.concatenate([lengths for _, lengths, _ in results]).astype("<u4"))
    np.save(directory / HASHES_NAME, np.concatenate([hashes for _, _, hashes in results]).astype("<u8"))
    if isinstance(tokenizer, HuggingFaceTokenizer):
        shutil.copyfile(tokenizer.path, directory / "tokenizer.json")
    index = PreparedIndex(
        format_version=FORMAT_VERSION,
        tokenizer=tokenizer.spec,
        tokenizer_fingerprint=tokenizer.fingerprint,
        eos_token=tokenizer.eos_token,
        eos_id=tokenizer.eos_id,
        vocab_size=tokenizer.vocab_size,
        dtype="uint16" if token_dtype(tokenizer.vocab_size) == np.dtype("<u2") else "uint32",
        documents=len(documents),
        tokens=sum(shard.tokens for shard in shards),
        lengths_file=LENGTHS_NAME,
        hashes_file=HASHES_NAME,
        shards=shards,
    )
    index.save(directory)
    load_index(directory)
    return index


_Result = tuple[Shard, np.ndarray, np.ndarray]


def _run(tasks: list[_Task], documents: Documents, tokenizer: Tokenizer, workers: int, bar: tqdm) -> Iterator[_Result]:
    if workers <= 1:

        class Counter:
            def add(self, documents: int) -> None:
                bar.update(documents)

        job = _Job(documents, tokenizer, Counter())
        yield from (_write_shard(task, job) for task in tasks)
        return
    context = multiprocessing.get_context("spawn")
    counter = _SharedCounter(context)
    job = _Job(documents, tokenizer, counter)
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(job,)) as pool:
        futures = [pool.submit(_write_shard, task) for task in tasks]
        try:
            for future in futures:
                while not future.done():
                    with contextlib.suppress(TimeoutError):
                        future.exception(timeout=0.5)
                    bar.update(counter.value() - bar.n)
                yield future.result()
        except BrokenProcessPool as error:
            raise UserError("a worker process was killed, perhaps for lack of memory; lower --workers") from error
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class _SharedCounter:
    def __init__(self, context: Any):
        self._value = context.Value("q", 0)

    def add(self, documents: int) -> None:
        with self._value.get_lock():
            self._value.value += documents

    def value(self) -> int:
        return self._value.value


_worker_job: _Job | None = None


def _start_worker(job: _Job) -> None:
    global _worker_job
    _worker_job = job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism


def _write_shard(task: _Task, job: _Job | None = None) -> _Result:
    from array_record.python.array_record_module import ArrayRecordWriter

    job = job or _worker_job
    assert job is not None
    dtype = token_dtype(job.tokenizer.vocab_size)
    path = task.directory / task.file
    lengths: list[int] = []
    hashes: list[int] = []
    try:
        writer = ArrayRecordWriter(str(path), WRITER_OPTIONS)
        for encoded, batch_hashes in encode_documents(job.documents, job.tokenizer, task.start, task.stop):
            for tokens in encoded:
                writer.write(tokens.astype(dtype).tobytes())
                lengths.append(len(tokens))
            hashes += batch_hashes
            job.progress.add(len(encoded))
        writer.close()
    except RuntimeError as error:  # how the writer reports a full disk
        raise UserError(f"--out: cannot write {task.file} ({' '.join(str(error).split())})") from error
    shard = Shard(file=task.file, documents=len(lengths), tokens=sum(lengths), bytes=path.stat().st_size)
    return shard, np.array(lengths, np.int64), np.array(hashes, np.uint64)
