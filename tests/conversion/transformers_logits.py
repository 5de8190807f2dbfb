"""Logits, a greedy continuation and ids of special tokens from stock transformers: DIRECTORY TOKENS.npy OUT.npz.

In a process of its own: any Python with PyTorch and transformers will do; it needs nothing of ours.
"""

import sys

import numpy as np
import torch
import transformers

directory, tokens, out = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
ids = torch.from_numpy(np.load(tokens).astype(np.int64))
with torch.no_grad():
    logits = model(ids).logits.numpy()
    greedy = ids[:1, :8]
    for _ in range(12):
        greedy = torch.cat([greedy, model(greedy).logits[:, -1:].argmax(-1)], dim=1)
settings = model.generation_config
np.savez(out, logits=logits, greedy=greedy.numpy(), special=[settings.bos_token_id, *settings.eos_token_id])
