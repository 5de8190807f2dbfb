"""Every setting of a run: frozen dataclasses, checked when they are made.

Field comments are the help text of the commands (`train.py --help`), so each says what the field means and its unit.
"""

from dataclasses import field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

Variant = Literal[
    "additive",
    "hyper_connections",
    "attention_residuals",
    "mhar",
    "mhar_headwise",
    "block_mhar",
    "delta",
    "delta_block",
]
ROUTED_VARIANTS = ("attention_residuals", "mhar", "mhar_headwise", "block_mhar", "delta", "delta_block")
DELTA_VARIANTS = ("delta", "delta_block")

Remat = Literal["none", "dots", "sublayer", "sources", "layer"]
RoutingImplementation = Literal["reference", "xla", "pallas_tpu", "triton"]
AttentionImplementation = Literal["xla", "cudnn", "tpu_flash"]
Schedule = Literal["cosine", "wsd", "linear"]

PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]  # what counts on a device is int32
Unrolled = Annotated[int, Field(gt=0, le=1000)]  # each of them is traced and compiled by itself
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]

_STRICT = ConfigDict(extra="forbid", validate_default=True)


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class RopeScaling:
    """Llama-3.1's stretch of the low rotary frequencies."""

    factor: PositiveFloat = 8.0  # how far the lowest frequencies are stretched
    low_freq_factor: PositiveFloat = 1.0  # wavelengths above original_context / this are stretched in full
    high_freq_factor: PositiveFloat = 4.0  # wavelengths below original_context / this are left alone
    original_context: PositiveInt = 8192  # context length of the unscaled model, in tokens

    @model_validator(mode="after")
    def _check(self):
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                "high_freq_factor must be above low_freq_factor, "
                f"got {self.high_freq_factor} and {self.low_freq_factor}"
            )
        return self


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class ModelConfig:
    """A decoder of Qwen3 or Llama shape, and how its sublayers read the depth history."""

    variant: Variant = "mhar"  # how a sublayer reads what came before it
    vocab_size: PositiveInt | None = None  # rows of the embedding; None: the tokenizer's, up to a multiple of 128
    num_layers: Unrolled = 12  # layers; each has an attention and an MLP sublayer
    d_model: PositiveInt = 512  # width D of the stream
    num_heads: Unrolled = 8  # attention query heads
    num_kv_heads: Unrolled = 4  # attention key/value heads
    head_dim: PositiveInt | None = None  # width of one attention head; None: d_model / num_heads
    ffn_dim: PositiveInt = 1536  # hidden width of the SwiGLU MLP
    context: PositiveInt = 2048  # longest sequence the model is meant for, in tokens
    qk_norm: bool = True  # RMSNorm on each head's query and key (Qwen3)
    tie_embeddings: bool = True  # the head is the embedding's transpose
    norm_eps: PositiveFloat = 1e-6  # eps of every RMSNorm and of the routing keys
    rope_theta: PositiveFloat = 1e4  # base of the rotary wavelengths
    rope_scaling: RopeScaling | None = None  # Llama-3.1 scaling; None: plain
    init_std: PositiveFloat = 0.02  # standard deviation of the normal initialiser
    routing_heads: PositiveInt | None = None  # heads H of the depth softmax; None: num_kv_heads
    num_blocks: PositiveInt = 8  # depth blocks of block_mhar and delta_block, ceil(num_layers / num_blocks) layers each
    null_source: bool = True  # delta forms: a learnable source per site beside the real ones
    gate: bool = True  # delta forms: a learnable scalar per site, closed (0) at the start
    hyper_streams: Annotated[int, Field(gt=0, le=64)] = 4  # parallel streams of hyper_connections
    compute_dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"  # activations and matrix products
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # master weights
    remat: Remat = "none"  # what is recomputed in the backward pass
    routing_implementation: RoutingImplementation | None = None  # None: the best that supports the device and input
    attention_implementation: AttentionImplementation | None = None  # None: the best that supports the device
    loss_chunk: PositiveInt = 2048  # tokens whose logits exist at once in the cross-entropy

    @property
    def heads_of_depth(self) -> int:
        """Heads H of the depth softmax after defaults: 1 for attention_residuals."""
        if self.variant == "attention_residuals":
            return 1
        return self.routing_heads or self.num_kv_heads

    @property
    def attention_head_dim(self) -> int:
        """Width of one attention head after defaults."""
        return self.head_dim or self.d_model // self.num_heads

    @property
    def is_routed(self) -> bool:
        """Whether the variant has depth softmaxes at all."""
        return self.variant in ROUTED_VARIANTS

    @model_validator(mode="after")
    def _check(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                "num_kv_heads must divide num_heads, "
                f"got num_kv_heads={self.num_kv_heads} and num_heads={self.num_heads}"
            )
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ValueError(
                f"num_heads must divide d_model unless head_dim is given, got num_heads={self.num_heads} "
                f"and d_model={self.d_model}"
            )
        if self.attention_head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.attention_head_dim}")
        if self.is_routed and self.d_model % self.heads_of_depth:
            raise ValueError(
                f"routing_heads must divide d_model, got routing_heads={self.heads_of_depth} and d_model={self.d_model}"
            )
        if self.variant == "attention_residuals" and self.routing_heads not in (None, 1):
            raise ValueError(
                f"attention_residuals has one routing head, got routing_heads={self.routing_heads}; "
                "leave it out or use variant mhar"
            )
        return self


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class DataConfig:
    """Where the text comes from and how it becomes tokens."""

    path: str | None = None  # file, glob or directory (text, jsonl, parquet, prepared); None: the embedded text
    format: Literal["auto", "text", "jsonl", "parquet", "tokens", "synthetic"] = "auto"  # auto: by file name
    text_field: str = "text"  # field (JSON lines) or column (parquet) that holds a document
    tokenizer: str = "bytes"  # "bytes", or the path of a Hugging Face tokenizer.json (or its directory)
    eos_token: str | None = None  # text of the end-of-text token; None: the usual names are looked for
    held_out: Annotated[float, Field(gt=0, lt=1)] = 0.05  # share of documents held out, chosen by document hash
    held_out_path: str | None = None  # evaluate on this text instead of a split of path
    shuffle: bool = True  # shuffle documents in every epoch, by seed
    tokenize_at_start_mb: NonNegativeInt = 256  # text up to this size is tokenised at the start, larger on the fly
    workers: NonNegativeInt = 0  # Grain worker processes for each host; 0: threads of the training process
    prefetch: Annotated[int, Field(gt=0, le=1000)] = 2  # batches prepared ahead


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class OptimizerConfig:
    """AdamW and its schedule."""

    peak_lr: PositiveFloat = 1e-3  # learning rate after warm-up
    final_lr_ratio: NonNegativeFloat = 0.1  # last learning rate as a share of the peak
    schedule: Schedule = "cosine"  # cosine; wsd: constant, then linear over the last decay_fraction; linear
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2  # share of the steps in which wsd decays
    warmup_steps: NonNegativeInt = 1000  # steps of linear rise from 0
    beta1: Fraction = 0.9  # decay of the mean gradient
    beta2: Fraction = 0.95  # decay of the mean squared gradient
    eps: PositiveFloat = 1e-8  # added to the root of the mean squared gradient
    weight_decay: NonNegativeFloat = 0.1  # decoupled, times the learning rate
    decay_mask: Literal["all", "matrices"] = "all"  # matrices: no decay on embeddings, norms, gates, queries, biases
    clip_norm: PositiveFloat | None = 1.0  # global gradient norm; None: no clipping
    accumulate: PositiveInt = 1  # micro-batches a step; batch_size is the whole step's
    z_loss: NonNegativeFloat = 0.0  # weight of mean(logsumexp(logits)^2)
    ema: Fraction = 0.0  # decay of the averaged weights; 0: none
    not_finite: Literal["stop", "skip"] = "stop"  # a step of infinite or NaN loss or gradient ends the run or is undone


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class MeshConfig:
    """Devices along each mesh axis; one of them may be -1, which takes what is left."""

    data: int = -1  # batch split, parameters replicated
    fsdp: int = 1  # batch split, parameters and optimizer state split
    context: int = 1  # sequences split: attention fetches keys and values, nothing else needs more than its own tokens
    tensor: int = 1  # heads and hidden widths split

    @model_validator(mode="after")
    def _check(self):
        sizes = (self.data, self.fsdp, self.context, self.tensor)
        if any(s == 0 or s < -1 for s in sizes) or sizes.count(-1) > 1:
            raise ValueError(
                f"mesh axes must be positive, at most one of them -1, got data, fsdp, context, tensor = {sizes}"
            )
        return self


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class EvalConfig:
    """Evaluation on the held-out text during training."""

    every: NonNegativeInt = 500  # steps between evaluations; 0: only at the end
    batches: PositiveInt = 16  # batches of batch_size a pass, always the same ones
    ema: bool = True  # evaluate the averaged weights where there are any


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class CheckpointConfig:
    """What is saved, how often, how long it is kept."""

    every: NonNegativeInt = 1000  # steps between checkpoints; 0: only at the end
    keep: PositiveInt = 3  # newest checkpoints kept
    resume: bool = True  # continue from the newest whole checkpoint in run_dir


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class LogConfig:
    """What is written while training."""

    every: PositiveInt = 10  # steps between lines of metrics.jsonl
    tensorboard: bool = True  # event files under run_dir/tensorboard
    wandb_project: str | None = None  # also log to Weights & Biases (extra: wandb)
    profile_steps: tuple[PositiveInt, PositiveInt] | None = None  # profile steps A to B into run_dir/profile

    @model_validator(mode="after")
    def _check(self):
        if self.profile_steps is not None and self.profile_steps[0] > self.profile_steps[1]:
            raise ValueError(
                f"profile_steps must be a first and a last step, got {self.profile_steps[0]}, {self.profile_steps[1]}"
            )
        return self


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class SampleConfig:
    """The text printed at the end of a run."""

    prompt: str = "It is a truth"  # what it continues
    tokens: NonNegativeInt = 200  # 0: no sample
    temperature: NonNegativeFloat = 0.8  # 0: the likeliest token


@dataclass(frozen=True, kw_only=True, config=_STRICT)
class Config:
    """A whole run."""

    run_dir: Annotated[str, Field(min_length=1)] = "runs/tiny"  # everything the run writes
    seed: NonNegativeInt = 42  # parameters, data order and sampling
    init_from: str | None = None  # start from this checkpoint's parameters (run, Hugging Face directory, .gguf)
    steps: PositiveInt = 20000  # optimizer steps
    batch_size: PositiveInt = 64  # sequences a step, over all devices and micro-batches
    seq_len: PositiveInt = 2048  # tokens a sequence
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)

    @model_validator(mode="after")
    def _check(self):
        if self.seq_len > self.model.context:
            raise ValueError(
                "seq_len must not exceed model.context, "
                f"got seq_len={self.seq_len} and model.context={self.model.context}"
            )
        if self.batch_size % self.optimizer.accumulate:
            raise ValueError(
                f"optimizer.accumulate must divide batch_size, got accumulate={self.optimizer.accumulate} "
                f"and batch_size={self.batch_size}"
            )
        return self
