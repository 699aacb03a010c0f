"""Sections `weights`, `checkpointing`, `logger` and `cluster`: a run's transport of weights, its checkpoints, its
records with alerts (`logger.rules`, `logger.webhooks`), and its processes."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from paceline.spec.sections.base import NonNegativeInt, PositiveFloat, PositiveInt, Section, Usual

FORM = "[change of] METRIC <|<=|>|>= NUMBER [for N steps]"
_PATTERN = re.compile(
    r"(?P<change>change of )?(?P<metric>\S{1,200}) (?P<op><=|>=|<|>) (?P<value>\S{1,40})(?: for (?P<steps>\d{1,6}) steps?)?"
)
Op = Literal["<", "<=", ">", ">="]


class Rule(NamedTuple):
    """A condition on a metric that must hold for several steps in a row."""

    metric: str
    """Name of the metric; `*` matches any characters."""
    op: Op
    value: float
    steps: int = 1
    of_change: bool = False
    """True if the rule compares the change since the step before, for metrics that count from the run's start."""

    def __str__(self) -> str:
        steps = f" for {self.steps} steps" if self.steps > 1 else ""
        return f"{'change of ' if self.of_change else ''}{self.metric} {self.op} {self.value:g}{steps}"


def parsed_rule(text: str) -> Rule:
    """Return the rule in a text of a spec. Raises ValueError."""
    match = _PATTERN.fullmatch(" ".join(text.split()))
    try:
        if match is None:
            raise ValueError
        value, steps = float(match["value"]), int(match["steps"] or 1)
        if not math.isfinite(value) or not steps:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"{text[:80]!r} is not a rule; write {FORM}, as 'truncated_fraction > 0.5 for 5 steps'"
        ) from None
    op: Op = match["op"]  # type: ignore[assignment]
    return Rule(match["metric"], op, value, steps, bool(match["change"]))


DEFAULT_RULES = tuple(
    map(
        parsed_rule,
        (
            "zero_variance_fraction > 0.9 for 5 steps",
            "truncated_fraction > 0.5 for 5 steps",
            "unscored_fraction > 0.5 for 3 steps",
            "failed_calls/* > 0 for 3 steps",
            "effective_sample_size < 0.5 for 3 steps",
            "ratio_behaviour > 1.1 for 3 steps",
            "ratio_behaviour < 0.9 for 3 steps",
            "kl_behaviour > 0.1 for 3 steps",
            "skipped_updates > 0 for 3 steps",
            "change of dropped/poison > 0",
            "change of dropped/stale > 0 for 5 steps",
            "change of */gpu_xid_errors > 0",
            "*/gpu_throttled > 0 for 10 steps",
        ),
    )
)
"""Rules of every run with `logger.default_rules`. Stalls are reported by `logger.stall_warning_s`."""


class WebhookSection(Section):
    """An address that gets a run's events by HTTP POST, signed with PACELINE_WEBHOOK_SECRET of the sending process."""

    url: str = ""
    """Address. An address that is itself a secret, such as Slack's, belongs in `url_variable`."""
    url_variable: Annotated[str, Field(pattern=r"^([A-Z][A-Z0-9_]{0,63})?$")] = ""
    """Environment variable of the sending process with the address."""
    events: Annotated[tuple[Literal["ended", "failed", "stalled", "rule", "warning"], ...], Field(min_length=1)] = (
        "ended",
        "failed",
        "stalled",
        "rule",
    )
    """Events to send. ended: the run succeeded or was cancelled. failed: the run failed. stalled: the learner has
    waited for long. rule: a rule is broken. warning: any other warning."""

    @model_validator(mode="after")
    def _check(self) -> WebhookSection:
        if bool(self.url) == bool(self.url_variable):
            raise ValueError("a webhook needs either url or url_variable")
        if self.url and (not self.url.startswith(("http://", "https://")) or "@" in self.url.split("/")[2]):
            raise ValueError(
                "url must be http(s)://HOST[:PORT]/… without a password; put a secret URL into url_variable"
            )
        return self


RuleText = Annotated[str, Field(max_length=300)]


def _checked_folder(folder: str | None, info: ValidationInfo) -> str | None:
    """Return `folder` if all services resolve it alike. Raises ValueError for a relative path."""
    if not folder or "://" in folder or folder.startswith("/"):
        return folder
    raise ValueError(
        f"{info.field_name} {folder!r} is relative, and the services may run in different directories; give an absolute path or a URL"
    )


Folder = Annotated[str | None, AfterValidator(_checked_folder)]


class WeightsSection(Section):
    """Transport of new weights to the rollout workers."""

    channel: Literal["collective", "delta"] = "collective"
    """`collective`: the whole model from host to host through their relays; a worker whose host has none reads the
    object store. `delta`: changed elements through the object store, without relays."""
    store: Folder = None
    """Folder of stored weights: a path or any fsspec URL; default `weights/` in the run's directory. A relative path in
    a spec's file is relative to the directory in which the command runs."""
    anchor_interval: PositiveInt = 50
    """Store a version in full after this many deltas, or once the deltas have more bytes than the last full version."""
    publish_interval: PositiveInt = 1
    """Steps between two published versions."""
    max_wait_s: Annotated[float, Field(gt=0, le=604_800)] = 30.0
    """Expel a member that, for this many seconds of a transfer, neither receives bytes nor reports that it is
    loading."""
    allow_plaintext_network: bool = False
    """Allow unencrypted weights between hosts with certificates (`--tls-dir`): for a learner on several hosts, or an
    object store without TLS. Relays always use TLS."""


class CheckpointingSection(Section):
    """Checkpoints of the learner's state."""

    enabled: bool = True
    """Write checkpoints."""
    save_period: PositiveInt = 50
    """Steps between two checkpoints; the last step always writes one."""
    keep_top_k: PositiveInt = 2
    """Complete checkpoints to keep: the newest or, with `metric_name`, the best and the newest checkpoint."""
    metric_name: Annotated[str, Field(pattern=r"^(train|val):\S+$")] | None = None
    """Metric of the best checkpoint: `val:reward` (evaluated after the step), or `train:` and a step's metric."""
    higher_is_better: bool = True
    """True if the highest value of the metric is the best."""
    export_dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Type of the weights of exported models; a separately exported adapter stays float32. auto: the samplers' type
    (policy.generation_precision); without samplers policy.precision. A coarser type may lose small changes."""
    checkpoint_dir: Folder = None
    """Parent folder of the runs' checkpoint folders: a path that all ranks see, or an fsspec URL
    (`s3://bucket/folder`). Default `checkpoints/` in the run's directory. A relative path in a spec's file is
    relative to the directory in which the command runs."""


class TrackerSection(Section):
    """A tracker of a run's metrics. Its key or password is in the environment of the sending process, never in the spec."""

    kind: Literal["wandb", "mlflow", "tensorboard"]
    """Weights & Biases, MLflow (a server), or TensorBoard's files."""
    project: Annotated[str, Field(min_length=1, max_length=128)] = "paceline"
    """Project in the tracker; MLflow's experiment."""
    url: str = ""
    """URL of the server; empty: the URL in the tracker's own variables (WANDB_BASE_URL, MLFLOW_TRACKING_URI)."""
    offline: bool = False
    """W&B: write files for `wandb sync` beside the run's tracking cursors."""
    names: Literal["paceline", "trl", "nemo_rl"] = "paceline"
    """Library whose names the metrics get: Paceline, TRL or NeMo RL (docs/use/trackers.md)."""
    samples_per_step: Annotated[int, Field(ge=0, le=64)] = 2
    """Groups of each step whose completions are sent as a table."""

    @model_validator(mode="after")
    def _check(self) -> TrackerSection:
        if self.offline and self.kind != "wandb":
            raise ValueError(f"offline with kind {self.kind!r}: only wandb writes files for later; remove offline")
        if self.url and (not self.url.startswith(("http://", "https://")) or "@" in self.url.split("/")[2]):
            raise ValueError(
                f"url {self.url.split('@')[-1]!r} must be http(s)://HOST[:PORT]/… without a password, which belongs in the "
                "environment of the sending process"
            )
        return self


class LoggerSection(Section):
    """Records of a run: metrics, samples, trackers and alerts."""

    tensorboard: bool = True
    """Write TensorBoard events beside metrics.jsonl."""
    keep_samples: bool = True
    """Keep trained groups in the ledger as the run's trace data set (`paceline samples`)."""
    keep_evaluations: NonNegativeInt = 8
    """Number of the newest evaluations whose completions are kept, with those of the first evaluation
    (`paceline samples RUN --eval`); 0, or `keep_samples: false`, keeps none."""
    keep_token_stats: Annotated[int, Field(ge=0, le=64)] = 2
    """Number of groups of rank 0 in each step for which the learner's log-probability and entropy of each token are
    kept, for the dashboard; 0 keeps none."""
    verify_share: Annotated[float, Field(ge=0, le=1)] = 0.002
    """Smallest share of each rollout worker's groups whose log-probabilities the learner compares with its own; the
    run's events name a worker whose log-probabilities are wrong. 0: none are compared."""
    verify_versions: NonNegativeInt | None = None
    """Number of older versions that the learner keeps in host memory, each rank its shards. Tokens of other older versions
    are not compared. Default: max_trajectory_age_steps."""
    verify_drops: bool = False
    """Drop a named worker's groups that are not trained yet and have tokens of a version seen to be wrong. false trains
    them."""
    profile_period: NonNegativeInt = 0
    """Period in steps of torch's profiler on rank 0 of the learner, to measure time in collectives; slower. 0: never.
    """
    stall_warning_s: PositiveFloat = 60.0
    """If the learner has waited for this many seconds, a warning names the reason. Another warning follows after twice
    the time, and so on."""
    trackers: Annotated[tuple[TrackerSection, ...], Field(max_length=8)] = ()
    """Trackers to which `paceline up` sends the run; without `paceline up`, `paceline track` does so. At most one of
    each kind."""

    default_rules: bool = True
    """Warn by the default rules on metrics (docs/operate/alerts.md)."""
    rules: Annotated[tuple[RuleText, ...], Field(max_length=64)] = ()
    """Further rules: `METRIC > NUMBER for N steps`, with <, <=, > or >=. `*` matches any characters of a name; `change
    of` before the metric means the difference to the step before."""
    webhooks: Annotated[tuple[WebhookSection, ...], Field(max_length=8)] = ()
    """Addresses notified of the run's end, of stalls and of broken rules by the process that sends to trackers."""

    @field_validator("rules")
    @classmethod
    def _check_rules(cls, rules: tuple[str, ...]) -> tuple[str, ...]:
        for rule in rules:
            parsed_rule(rule)
        return rules

    @field_validator("trackers")
    @classmethod
    def _check_trackers(cls, trackers: tuple[TrackerSection, ...]) -> tuple[TrackerSection, ...]:
        kinds = [tracker.kind for tracker in trackers]
        if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
            raise ValueError(
                f"kind {twice[0]} occurs {kinds.count(twice[0])} times; only one tracker of each kind is possible"
            )
        return trackers


WORKERS = "1,000 members in docs/operate/performance.md"


class ClusterSection(Section):
    """Number of processes that `paceline up` starts on this host. The size of a cluster is its operator's decision."""

    rollout_workers: Annotated[PositiveInt, Usual(1, 1024, WORKERS)] = 2
    """Rollout services."""
    reward_workers: Annotated[PositiveInt, Usual(1, 1024, WORKERS)] = 1
    """Reward services."""
    environment_workers: Annotated[NonNegativeInt | None, Usual(0, 1024, WORKERS)] = None
    """Environment services; unset: one if the run has an environment, else none."""
    learner_ranks: Annotated[PositiveInt, Usual(1, 1024, WORKERS)] = 1
    """Ranks of the learner."""
    device: Literal["auto", "cpu"] = "auto"
    """auto: if no GPUs are named, `paceline up` divides those of the host and prints the division. cpu: use no GPU."""
    rollout_gpus: tuple[NonNegativeInt, ...] = ()
    """GPUs for rollout, split evenly over the workers."""
    learner_gpus: tuple[NonNegativeInt, ...] = ()
    """GPUs for the learner, one per rank."""
    reward_gpus: tuple[NonNegativeInt, ...] = ()
    """GPUs for the reward workers, split evenly over them; empty: CPU."""
    gpu_gb: PositiveFloat | None = None
    """Memory of one GPU in GB (10⁹ bytes), to plan for GPUs of another host; unset: the GPUs of the planning host."""
    threads_per_process: Annotated[PositiveInt, Usual(1, 1024, "the cores of a host")] = 1
    """Compute threads of each process on a CPU. With a GPU, a process gets its share of the cores if that is more."""

    @model_validator(mode="after")
    def _check(self) -> ClusterSection:
        if self.device == "cpu" and (self.rollout_gpus or self.learner_gpus or self.reward_gpus):
            raise ValueError("device is 'cpu', and GPUs are named in *_gpus; remove one of the two")
        if self.device == "cpu" and self.gpu_gb is not None:
            raise ValueError(f"device is 'cpu', and gpu_gb is {self.gpu_gb:g}; remove one of the two")
        return self
