"""Text from tokens as they come: whole characters only, up to a stop string."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from mhar_jax.data.tokenizers import Tokenizer
from mhar_jax.errors import UserError
from mhar_jax.generation.engine import TokenGenerator
from mhar_jax.generation.sampling import NOT_A_NUMBER, Sampling

_BEFORE = 8  # tokens of the prompt that are decoded along: some decoders treat the start of a text differently
_UNFINISHED = "\ufffd"  # what bytes that are not (yet) a character decode to


class Characters:
    """The text of a growing list of tokens, without the half character that it may end in."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] | np.ndarray, *, whole: bool = False):
        """`whole`: the prompt was text, so that it ends in a character, be it U+FFFD itself."""
        self._tokenizer = tokenizer
        self._ids = [int(i) for i in prompt[-_BEFORE:]]
        self._told = len(tokenizer.decode(self._ids) if whole else self._whole())

    def _whole(self) -> str:
        # A cut character decodes to U+FFFD, once or for each byte, which its next bytes take back.
        return self._tokenizer.decode(self._ids).rstrip(_UNFINISHED)

    def push(self, token: int) -> str:
        """What is new in the text after this token; may be empty."""
        self._ids.append(int(token))
        text = self._whole()
        new, self._told = text[self._told :], max(self._told, len(text))
        if len(self._ids) > 4 * _BEFORE and self._tokenizer.decode(self._ids[-_BEFORE:])[:1] not in ("", _UNFINISHED):
            self._ids = self._ids[-_BEFORE:]  # begins at a character
            self._told = len(self._whole())
        return new

    def flush(self) -> str:
        """What is left at the end: broken bytes as U+FFFD."""
        return self._tokenizer.decode(self._ids)[self._told :]


class StopStrings:
    """Passes text on, except what is or may become a stop string."""

    def __init__(self, stops: Sequence[str]):
        if any(not stop for stop in stops):
            raise UserError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """The part of the text so far that is certain to lie before any stop string and has not been told."""
        if self.found:
            return ""
        self._held += text
        places = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            told, self._held = self._held[: min(places)[1]], ""  # the first to be complete, however the text comes
            return told
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        keep = next((n for n in range(min(longest, len(self._held)), 0, -1) if self._may_end_in_a_stop(n)), 0)
        told, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return told

    def _may_end_in_a_stop(self, size: int) -> bool:
        return any(stop.startswith(self._held[-size:]) for stop in self._stops)

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        told, self._held = self._held, ""
        return told


@dataclasses.dataclass
class Completion:
    """What a prompt was continued by."""

    text: str  # without the stop string
    tokens: list[int]  # drawn, the end-of-text or those of the stop string included
    reason: str  # "end" (end-of-text), "stop" (a stop string), "length" (max_tokens) or "context" (it is full)


class _Row:
    """One prompt's continuation in progress."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: np.ndarray,
        stops: Sequence[str],
        most: int,
        *,
        context_is_full: bool,
        whole: bool,
    ):
        self._tokenizer, self._most, self._context_is_full = tokenizer, most, context_is_full
        self._characters, self._stops = Characters(tokenizer, prompt, whole=whole), StopStrings(stops)
        self.completion = Completion("", [], "")

    def push(self, token: int) -> str:
        """Takes a token, unless this row is done; returns new text."""
        done = self.completion
        if done.reason:
            return ""
        if token < 0:
            raise UserError(NOT_A_NUMBER)
        done.tokens.append(int(token))
        new = ""
        if token == self._tokenizer.eos_id:
            done.reason = "end"
        else:
            new = self._stops.push(self._characters.push(token))
            if self._stops.found:
                done.reason = "stop"
            elif len(done.tokens) == self._most:
                done.reason = "context" if self._context_is_full else "length"
        if done.reason in ("end", "length", "context"):
            new += self._stops.push(self._characters.flush())
            if self._stops.found:
                done.reason = "stop"
            new += self._stops.flush()
        done.text += new
        return new


def complete(
    generator: TokenGenerator,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int] | np.ndarray],
    *,
    max_tokens: int = 200,
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    on_text: Callable[[int, str], None] | None = None,
) -> list[Completion]:
    """Continues prompts, all in one batch; each as if it were alone.

    Args:
      generator: of the model.
      tokenizer: of the model.
      prompts: texts, or token ids.
      max_tokens: tokens a prompt is continued by at most; fewer where its context is full.
      sampling: None: greedy.
      stop: strings that end a continuation and are not part of it, wherever they fall across tokens.
      on_text: called with a prompt's index and new text as it comes: whole characters, nothing of a stop string.

    Raises:
      UserError: an empty prompt, one that is not UTF-8 or does not fit the context, a token outside the vocabulary, a
        model that gives NaN.
    """
    if max_tokens < 1:
        raise UserError(f"max_tokens must be at least 1, got {max_tokens}")
    if not prompts:
        return []
    try:
        ids = [tokenizer.encode(p) if isinstance(p, str) else np.asarray(p) for p in prompts]
    except UnicodeEncodeError as error:  # half a surrogate pair, or bytes of the command line that are not UTF-8
        raise UserError(f"the prompt is not text in UTF-8, from its character {error.start}") from None
    context = generator.config.context
    room = [context - len(p) for p in ids]
    rows = [
        _Row(tokenizer, p, stop, min(max_tokens, r), context_is_full=r < max_tokens, whole=isinstance(prompt, str))
        for prompt, p, r in zip(prompts, ids, room, strict=True)
    ]
    for tokens in generator.steps([p.tolist() for p in ids], max_tokens, sampling or Sampling()):
        for i, (row, token) in enumerate(zip(rows, tokens.tolist(), strict=True)):
            new = row.push(token)
            if new and on_text is not None:
                on_text(i, new)
        if all(row.completion.reason for row in rows):
            break
    return [row.completion for row in rows]
