"""Text to batches of tokens: readers, tokenizers, the held-out split, packing, and prepared token shards.

Grain, pyarrow, array_record and tokenizers are imported only where they are used.
"""

from mhar_jax.data.pipeline import describe_data, make_eval_batches, make_train_iterator
from mhar_jax.data.state import merge_states
from mhar_jax.data.tokenizers import Tokenizer, load_tokenizer

__all__ = [
    "Tokenizer",
    "describe_data",
    "load_tokenizer",
    "make_eval_batches",
    "make_train_iterator",
    "merge_states",
]
