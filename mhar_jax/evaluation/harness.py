"""lm-evaluation-harness: a model of ours behind its interface, and its tasks from the command line.

Imported only where the harness is used: it is the extra `eval`. Works without PyTorch and, with local tasks, offline.
"""

import dataclasses
import logging
import math
import os
import pathlib
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from mhar_jax.data.tokenizers import Tokenizer
from mhar_jax.errors import UserError, one_line
from mhar_jax.evaluation import task_data
from mhar_jax.evaluation.code import local_code_eval
from mhar_jax.evaluation.scoring import Scorer
from mhar_jax.evaluation.text import score_token_documents
from mhar_jax.generation import Sampling, TokenGenerator, complete
from mhar_jax.inference import PlacedModel, bucket
from mhar_jax.training.checksums import examine, json_digest

_log = logging.getLogger("mhar_jax")
_KNOWN = {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p"}  # settings of generation


class HarnessModel(TemplateLM):
    """`lm_eval.api.model.LM` over a placed model; requests are sorted by length and batched to few compiled shapes.

    A text without context is read after one end-of-text. Rolling log-likelihoods use windows of `window` tokens that
    predict `stride` new ones each (`evaluation.text`); with stride = window they are the harness's own.
    """

    def __init__(
        self,
        placed: PlacedModel,
        tokenizer: Tokenizer,
        *,
        window: int | None = None,
        stride: int | None = None,
        batch_tokens: int = 8192,
        prefix: int | None = None,
    ):
        """`window`: None: the model's context. `stride`: None: the window. `prefix`: None: the end-of-text token."""
        super().__init__()
        self.tokenizer_of_ours = tokenizer
        self.window = window or placed.config.context
        self.stride = stride or self.window
        self.scorer = Scorer(placed, batch_tokens=batch_tokens)
        self.generator = TokenGenerator(placed, vocabulary=tokenizer.vocab_size)
        self._context, self._batch_tokens = placed.config.context, batch_tokens
        self._prefix = tokenizer.eos_id if prefix is None else prefix

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        return self.tokenizer_of_ours.eos_id

    @property
    def prefix_token_id(self) -> int:
        """What is read before a text that has no context."""
        return self._prefix

    @property
    def tokenizer_name(self) -> str:
        """Tells cached requests of other tokenizers apart."""
        return self.tokenizer_of_ours.fingerprint

    def fingerprint(self) -> str:
        """Of what decides its answers: parameters, shape and types, tokenizer, windows and prefix."""
        placed = self.scorer.placed
        settings = [self.window, self.stride, self._prefix, self.tokenizer_of_ours.fingerprint, repr(placed.config)]
        return json_digest([examine(placed.params).checksums, *settings])[:16]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids; special tokens are never added."""
        return self.tokenizer_of_ours.encode(string).tolist()

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each text, in nats."""
        texts = [request.args[0] for request in requests]
        encoded = self.tokenizer_of_ours.encode_batch(texts)
        bar = tqdm(total=None, disable=disable_tqdm, desc="rolling log-likelihoods", unit="window")
        found = [0.0] * len(texts)
        some = [i for i, ids in enumerate(encoded) if len(ids)]
        if some:
            documents = [encoded[i] for i in some]
            nlls = score_token_documents(
                self.scorer, documents, self._prefix, window=self.window, stride=self.stride, progress=bar.update
            )
            for i, nll in zip(some, nlls, strict=True):
                found[i] = -nll
        bar.close()
        for request, value in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return found

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **options: Any,
    ) -> list[tuple[float, bool]]:
        sequences: list[np.ndarray] = []
        scored: list[int] = []
        for (_, continuation), context_ids, continuation_ids in requests:
            if len(continuation_ids) > self._context:
                raise UserError(
                    f"a continuation of {len(continuation_ids)} tokens does not fit the model's context of "
                    f"{self._context}: {one_line(continuation, 60)!r}"
                )
            # The start of a context that is too long is dropped, as the harness does.
            sequences.append(np.array((context_ids + continuation_ids)[-self._context - 1 :], np.int64))
            scored.append(len(continuation_ids))
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="log-likelihoods", unit="request")
        some = [i for i, count in enumerate(scored) if count]
        answers = [(0.0, True)] * len(requests)
        for batch in self.scorer.batches([sequences[i] for i in some]):
            for at, found in batch.items():
                count = scored[some[at]]
                answer = math.fsum(found.logprobs[-count:].tolist()), bool(found.best[-count:].all())
                answers[some[at]] = answer
                self.cache_hook.add_partial("loglikelihood", requests[some[at]][0], answer)
            bar.update(len(batch))
        bar.close()
        return answers

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations up to a stop string, the end of text or `max_gen_toks`."""
        bar = tqdm(total=len(requests), disable=disable_tqdm, desc="generation", unit="request")
        answers: dict[int, str] = {}
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items(), key=str)), []).append(i)
        for members in groups.values():
            self._generate(requests, members, answers, bar.update)
        bar.close()
        return [answers[i] for i in range(len(requests))]

    def _generate(
        self, requests: list[Instance], members: list[int], answers: dict[int, str], done: Callable[[int], Any]
    ) -> None:
        """Continues the requests `members`, which all have the same settings."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(requests[members[0]].args[1]))
        if unknown := sorted(name for name in options.keys() - _KNOWN if options[name] is not None):
            _log.warning("generation settings without effect here: %s", ", ".join(unknown))
        most = min(options["max_gen_toks"], self._context - 1)
        room = max(self._context - most, self._context // 2)  # the harness keeps the first; a token is no question
        sampling = Sampling(
            temperature=options.get("temperature", 0.0),
            top_k=options.get("top_k") or None,
            top_p=options.get("top_p") or None,
        )
        prompts = {}
        for i in members:
            ids = self.tok_encode(requests[i].args[0]) or [self._prefix]
            prompts[i] = np.array(ids[-room:], np.int32)
        if short := sum(len(prompt) + most > self._context for prompt in prompts.values()):
            _log.warning(
                "%d of %d prompts leave less than max_gen_toks=%d of the context of %d to their answers; at most the "
                "last %d tokens of a prompt are read",
                short,
                len(prompts),
                options["max_gen_toks"],
                self._context,
                room,
            )
        order = sorted(members, key=lambda i: -len(prompts[i]))
        while order:
            # A request that is there several times, for pass@k, is drawn with as many seeds, whatever the batches.
            sampling = dataclasses.replace(sampling, seed=len(members) - len(order))
            slots = bucket(len(prompts[order[0]]) + most, self._context)
            size = max(1, self._batch_tokens // slots)
            batch, order = order[:size], order[size:]
            completions = complete(
                self.generator,
                self.tokenizer_of_ours,
                [prompts[i] for i in batch],
                max_tokens=most,
                sampling=sampling,
                stop=[stop for stop in options.get("until", []) if stop],
            )
            for i, completion in zip(batch, completions, strict=True):
                answers[i] = completion.text
                self.cache_hook.add_partial("generate_until", requests[i].args, completion.text)
            done(len(batch))


def run_tasks(
    model: HarnessModel,
    tasks: Sequence[str],
    *,
    task_directory: str | None = None,
    data_directory: str | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    offline: bool = False,
    allow_code: bool = False,
    cache: str | None = None,
) -> dict[str, Any]:
    """Runs tasks of the harness, or of YAML files in `task_directory`; its results, samples included.

    Args:
      model: what answers.
      tasks: names.
      task_directory: of task files that are known beside (offline: instead of) the harness's own.
      data_directory: of the tasks' data sets as JSON lines (`evaluation.task_data`); None: the hub's.
      limit: items of each task; None: all.
      num_fewshot: examples before each item; None: the task's.
      offline: nothing is fetched.
      allow_code: run generated programs, as HumanEval and MBPP score them.
      cache: beginning of a file name; answers are kept there as they come, so that a run that was stopped goes on. The
        model's fingerprint is part of the name, so that no model gets another one's answers.

    Raises:
      UserError: an unknown task, or one whose data cannot be read or lacks what its task file reads, that needs a
        package that is missing, or that runs programs without `allow_code`.
    """
    os.environ["DISABLE_MULTIPROC"] = "1"  # its bootstrap would fork a process in which JAX has threads
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    if task_directory is not None and not pathlib.Path(task_directory).is_dir():
        raise UserError(f"the task directory {task_directory} does not exist")
    manager = TaskManager(include_path=task_directory, include_defaults=task_directory is None or not offline)
    known = set(manager.all_tasks)
    if unknown := [task for task in tasks if task not in known]:
        if not known:
            raise UserError(f"there is no task {unknown[0]!r}: {task_directory} holds no task file")
        some = ", ".join(sorted(known)[:5])
        raise UserError(f"there is no task {unknown[0]!r}; the {len(known)} known ones begin with {some}")
    try:
        with task_data.no_network(offline), local_code_eval(allow_code), task_data.local_data_sets(data_directory):
            results = simple_evaluate(
                model=model,
                tasks=list(tasks),
                num_fewshot=num_fewshot,
                limit=limit,
                task_manager=manager,
                use_cache=None if cache is None else f"{cache}-{model.fingerprint()}",
                bootstrap_iters=1000,
                log_samples=True,
                confirm_run_unsafe_code=allow_code,
            )
    except UserError:
        raise
    except (OSError, ConnectionError) as error:
        hint = "; --task-data reads JSON lines" if offline and data_directory is None else ""
        raise UserError(f"the data of {', '.join(tasks)} cannot be read: {one_line(error)}{hint}") from None
    except ImportError as error:
        raise UserError(
            f"{', '.join(tasks)} needs a package that is missing, extra `eval`: {one_line(error)}"
        ) from None
    except Exception as error:
        if isinstance(error, AssertionError) and "are required" in str(error):  # minerva_math's, of a version
            raise UserError(f"{', '.join(tasks)} needs other packages, extra `eval`: {one_line(error)}") from None
        if "marked as unsafe" in str(error):
            raise UserError(f"{', '.join(tasks)}: a task runs what the model wrote; give --allow-code") from None
        frames = traceback.extract_tb(error.__traceback__)[1:]  # without this function
        package, reader = pathlib.Path(__file__).parents[1], pathlib.Path(task_data.__file__)
        files = [pathlib.Path(frame.filename) for frame in frames]
        if any(file.is_relative_to(package) and file != reader for file in files):
            raise  # a fault of ours
        place = f"{files[-1].name}, line {frames[-1].lineno}"
        raise UserError(
            f"the harness cannot run {', '.join(tasks)} on these items and settings: {type(error).__name__}: "
            f"{one_line(error)} ({place})"
        ) from error
    assert results is not None
    return dict(results)
