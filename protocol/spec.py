"""The run specification: everything that nodes of one training effort must agree on.

A run is defined by its canonical form, and named by that form's hash, the fingerprint. The
fingerprint is part of every DHT key, so nodes with different specifications never meet.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blocktrain.protocol.errors import SpecError
from blocktrain.protocol.schema import bounded, from_mapping

PROTOCOL_VERSION = 1
"""Version of everything that crosses the network. Nodes refuse a specification with another one."""

RUN_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
"""Regular expression of a run's name, which is also the name of a folder."""
VOCABULARY_SIZES = {"bytes": 256}
MAX_SPEC_BYTES = 16_384
MAX_BLOCK_PARAMETERS = 4_000_000_000


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Shape of the model: `blocks` residual denoising blocks of `layers` transformer layers each."""

    vocabulary: str = bounded("bytes", choices=("bytes",))
    """What a token is. `bytes`: 256 tokens, one a byte."""
    d_model: int = bounded(128, low=8, high=16_384)
    """Width of the residual stream and of a row of the embedding table."""
    heads: int = bounded(4, low=1, high=256)
    """Attention heads; d_model must be a multiple of 2 × heads (RoPE rotates pairs)."""
    blocks: int = bounded(3, low=1, high=64)
    """B, the number of blocks; each needs at least one holder."""
    layers: int = bounded(2, low=1, high=256)
    """Transformer layers in each block."""
    context: int = bounded(128, low=2, high=65_536)
    """Sequence length in tokens."""
    head: str = bounded("bayes", choices=("bayes", "plain", "edm"))
    """How a block turns features into logits."""
    target: str = bounded("shared", choices=("shared", "frozen"))
    """Rows that noise is added to: the normalised shared table, or a random table made from the seed."""

    @property
    def vocabulary_size(self) -> int:
        """V, the number of different tokens."""
        return VOCABULARY_SIZES[self.vocabulary]


@dataclass(frozen=True, slots=True)
class NoiseSpec:
    """Noise levels: ln σ ~ N(p_mean, p_std²) truncated to [sigma_min, sigma_max], cut into B bands."""

    sigma_min: float = bounded(1.0, low=1e-3, high=1e3)
    sigma_max: float = bounded(10.0, low=1e-3, high=1e3)
    p_mean: float = bounded(-1.2, low=-20, high=20)
    p_std: float = bounded(1.2, low=1e-2, high=20)
    sigma_data: float = bounded(0.5, low=1e-3, high=1e3)
    gamma: float = bounded(0.1, low=0, high=1)
    """Each band is widened by this share of its log-width on both sides."""
    null_fraction: float = bounded(0.5, low=0, high=1)
    """Share of the sequences that train at z = 0, the condition of the ensemble readout."""
    weighting: str = bounded("uniform", choices=("uniform", "edm"))
    """Weight of a sequence's loss: 1, or (σ² + σ_data²)/(σ σ_data)² normalised to mean 1 in the band."""


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """AdamW and its learning-rate schedule; every holder uses the same."""

    batch: int = bounded(16, low=1, high=65_536)
    """Sequences in one local step."""
    lr: float = bounded(2e-3, low=0, high=10)
    beta1: float = bounded(0.9, low=0, high=0.999999)
    beta2: float = bounded(0.95, low=0, high=0.999999)
    eps: float = bounded(1e-8, low=1e-16, high=1)
    weight_decay: float = bounded(0.01, low=0, high=10)
    grad_clip: float = bounded(1.0, low=0, high=1e6)
    """Greatest global gradient norm; 0 switches clipping off."""
    warmup_steps: int = bounded(20, low=0, high=10_000_000)
    schedule: str = bounded("constant", choices=("constant", "cosine"))
    total_steps: int = bounded(100_000, low=1, high=1_000_000_000)
    """Length of the cosine schedule in local steps; it ends at a tenth of lr."""


@dataclass(frozen=True, slots=True)
class RoundSpec:
    """How holders of one block average."""

    steps: int = bounded(20, low=1, high=1_000_000)
    """H, local steps between two rounds."""
    deadline_s: float = bounded(60.0, low=1, high=86_400)
    """A round begins at the latest this many seconds after the one before, on the DHT clock."""
    timeout_s: float = bounded(60.0, low=1, high=3_600)
    """A round that has begun is abandoned after this many seconds."""
    wire: str = bounded("fp16", choices=("fp16", "fp32"))
    """Type of a parameter on the network."""


@dataclass(frozen=True, slots=True)
class GossipSpec:
    """How the shared embedding table spreads among all nodes."""

    every_rounds: int = bounded(1, low=1, high=1_000_000)
    """G, rounds between two gossip exchanges of a node."""
    wire: str = bounded("fp32", choices=("fp16", "fp32"))


@dataclass(frozen=True, slots=True)
class RunSpec:
    """One training effort. Make it with `from_toml` or `from_mapping`; then it is valid."""

    name: str = bounded(low=1, high=64, pattern=RUN_NAME)
    seed: int = bounded(0, low=0, high=2**63 - 1)
    protocol: int = PROTOCOL_VERSION
    model: ModelSpec = field(default_factory=ModelSpec)
    noise: NoiseSpec = field(default_factory=NoiseSpec)
    optimizer: OptimizerSpec = field(default_factory=OptimizerSpec)
    rounds: RoundSpec = field(default_factory=RoundSpec)
    gossip: GossipSpec = field(default_factory=GossipSpec)

    @classmethod
    def from_mapping(cls, data: object) -> RunSpec:
        """Check a mapping of TOML or JSON values.

        Raises:
            SpecError: names the first field that is unknown, missing, mistyped or impossible.
        """
        if isinstance(data, dict):
            _check_version(data.get("protocol", PROTOCOL_VERSION))
        spec = from_mapping(cls, data, error=SpecError)
        _check_together(spec)
        return spec

    @classmethod
    def from_toml(cls, text: str) -> RunSpec:
        """Parse the TOML text of a run file. Raises: SpecError."""
        try:
            data = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # tomllib lets int() complain of too many digits
            raise SpecError(f"not valid TOML: {str(error)[:200]}") from None
        return cls.from_mapping(data)

    @classmethod
    def from_file(cls, path: Path) -> RunSpec:
        """Read a run file. Raises: SpecError, with the file's name in front."""
        try:
            with path.open("rb") as file:
                data = file.read(MAX_SPEC_BYTES + 1)
        except OSError as error:
            raise SpecError(f"{path}: can't be read: {error.strerror}") from None
        if len(data) > MAX_SPEC_BYTES:
            raise SpecError(f"{path}: larger than {MAX_SPEC_BYTES} bytes; is it a run file?")
        try:
            return cls.from_toml(data.decode("utf-8-sig"))
        except UnicodeDecodeError:
            raise SpecError(f"{path}: not UTF-8 text; a run file is TOML") from None
        except SpecError as error:
            raise SpecError(f"{path}: {error}") from None

    @classmethod
    def from_canonical(cls, data: bytes) -> RunSpec:
        """Parse what `canonical` wrote, as it comes from the network. Raises: SpecError."""
        if len(data) > MAX_SPEC_BYTES:
            raise SpecError(f"the specification is larger than {MAX_SPEC_BYTES} bytes")
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            raise SpecError("the specification is not valid JSON") from None
        return cls.from_mapping(value)

    def canonical(self) -> bytes:
        """The specification as sorted JSON with all defaults filled in; equal runs give equal bytes."""
        return json.dumps(self.to_mapping(), sort_keys=True, separators=(",", ":")).encode()

    def to_toml(self) -> str:
        """The specification as a run file, with all defaults written out."""
        fields = self.to_mapping()
        tables = {name: value for name, value in fields.items() if isinstance(value, dict)}
        lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items() if name not in tables]
        for table, values in tables.items():
            lines += ["", f"[{table}]", *(f"{name} = {json.dumps(value)}" for name, value in values.items())]
        return "\n".join(lines) + "\n"

    def to_mapping(self) -> dict[str, Any]:
        """All fields, nested, as plain values."""
        return dataclasses.asdict(self)

    @property
    def fingerprint(self) -> str:
        """32 hexadecimal digits: the first 128 bits of SHA-256 of the canonical form."""
        return hashlib.sha256(self.canonical()).hexdigest()[:32]


def _check_version(version: object) -> None:
    """Before anything else: a later version may well have fields that are unknown here."""
    if isinstance(version, int) and version > PROTOCOL_VERSION:
        raise SpecError(
            f"protocol: newer than {PROTOCOL_VERSION}, the version spoken here; update blocktrain"
        )
    if isinstance(version, int) and version < PROTOCOL_VERSION:
        raise SpecError(
            f"protocol: older than {PROTOCOL_VERSION}, the version spoken here; use an older release"
        )


def _check_together(spec: RunSpec) -> None:
    """Conditions across fields; each message names the fields and the way out."""
    model, noise = spec.model, spec.noise
    if model.d_model % (2 * model.heads):
        raise SpecError(
            f"model.d_model: {model.d_model} is not a multiple of 2 × model.heads ({2 * model.heads})"
        )
    if noise.sigma_min >= noise.sigma_max:
        raise SpecError(
            f"noise.sigma_min: {noise.sigma_min:g} must be below noise.sigma_max ({noise.sigma_max:g})"
        )
    parameters = 18 * model.layers * model.d_model**2
    if parameters > MAX_BLOCK_PARAMETERS:
        raise SpecError(
            f"model.layers: a block of about {parameters / 1e9:.1f} billion parameters is over the limit of "
            f"{MAX_BLOCK_PARAMETERS / 1e9:g}; use more blocks or a smaller model.d_model"
        )
    if spec.optimizer.warmup_steps > spec.optimizer.total_steps:
        raise SpecError(
            f"optimizer.warmup_steps: {spec.optimizer.warmup_steps} must not exceed optimizer.total_steps "
            f"({spec.optimizer.total_steps})"
        )
