"""Metrics of a run, for `paceline metrics --explain` and the page of metrics; `reward/<function>` has a parameter."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import NamedTuple


class Metric(NamedTuple):
    """Meaning, unit and healthy range of a metric."""

    name: str
    unit: str
    meaning: str
    healthy: str = ""
    """Expected values, and the meaning of other values; empty if there is nothing to say."""


class Part(NamedTuple):
    """Metrics that one section of the page shows."""

    kind: str
    """`kind` of the lines of metrics.jsonl that have these metrics; in TensorBoard a prefix of their names."""
    title: str
    remark: str
    metrics: tuple[Metric, ...]


REWARDS = Part("train", "Rewards of the batch", "Computed by the coordinator when it fixes the batch.", (
    Metric("reward", "reward", "mean total reward (Σ weight · reward) of the batch", "rises; noisy from step to step"),
    Metric("reward_std", "reward", "standard deviation of the total reward over all completions"),
    Metric("reward_group_std", "reward", "mean over groups of the standard deviation within the group",
           "above 0; at 0 no group gives an advantage"),
    Metric("zero_variance_fraction", "share", "groups whose rewards give no completion an advantage, for example because all are equal",
           "absent if advantages depend on more than rewards (`gae`, `reinforce_pp`, a KL in the reward, rewards of turns); below 0.5; near 1 the prompts are too hard or too easy, and `grpo.use_dynamic_sampling` helps"),
    Metric("unscored_fraction", "share", "completions for which every reward function returned None", "0, unless the functions return None for some rows"),
    Metric("reward/<function>", "reward", "mean reward of one function, before its weight, over the completions that it scored"),
    Metric("reward_std/<function>", "reward", "standard deviation of one function's rewards over the completions that it scored",
           "0 means that the function does not distinguish completions"),
    Metric("reward_p<percentile>/<function>", "reward", "10th, 50th and 90th percentile of one function's rewards over the completions that it scored",
           "if the median is the largest value, the function has nothing left to teach"),
    Metric("unscored_fraction/<function>", "share", "completions for which the function returned None", "0, unless the function returns None for some rows"),
    Metric("reward_weight/<function>", "", "weight of the function in this step", "absent without `weight_schedule`"),
    Metric("closed_fraction/<function>", "share", "completions for which the gate was closed: other functions count as 0",
           "falls; absent without `gate_min`"),
    Metric("reward_of/<source>", "reward", "mean total reward of the groups of one source (`data.source_key`)",
           "absent without `data.source_key`"),
    Metric("groups_of/<source>", "groups", "groups of the source in the batch", "the share of `data.train_weights`"),
    Metric("score_s/<function>", "s", "mean time of a call on one group, over the calls that ended since the step before",
           "far below `timeout_s`"),
    Metric("failed_calls/<function>", "calls", "calls that failed since the step before, including failures that the function did not cause", "0"),
    Metric("endpoint_requests/<function>", "requests", "requests to the service behind a function (judge, reward model) since the step "
           "before, repeated ones included", "absent without a service"),
    Metric("endpoint_failed/<function>", "requests", "requests to the service that got no usable answer", "0"),
    Metric("endpoint_cached/<function>", "answers", "answers of a service that came from the cache, at no cost"),
    Metric("endpoint_no_verdict/<function>", "votes", "votes of a judge without a verdict after all attempts", "near 0"),
    Metric("endpoint_prompt_tokens/<function>", "tokens", "prompt tokens that the service counted"),
    Metric("endpoint_completion_tokens/<function>", "tokens", "completion tokens that the service counted"),
    Metric("endpoint_cost/<function>", "currency", "cost of the tokens since the step before, by `prompt_price` and `completion_price` of the endpoint"),
    Metric("logged/<name>", "its own", "mean of the values that reward functions logged by `log_metric(name, value)` and that "
           "arrived since the step before", "absent if no value arrived"),
))  # fmt: skip
COMPLETIONS = Part("train", "Completions of the batch", "Computed by the coordinator and the learner.", (
    Metric("completion_length", "tokens", "mean length of a completion", "a sudden fall or rise often precedes a collapse"),
    Metric("completion_length/min", "tokens", "shortest completion"),
    Metric("completion_length/max", "tokens", "longest completion", "below `max_new_tokens`; if equal, completions were truncated"),
    Metric("completion_length/p<percentile>", "tokens", "50th, 90th and 99th percentile of the lengths"),
    Metric("truncated_fraction", "share", "completions that were truncated at their token limit",
           "below 0.1; if more, raise `policy.generation.max_new_tokens` or see `grpo.overlong_filtering`"),
    Metric("zero_advantage_fraction", "share", "tokens whose advantage is 0", "below 0.5; at 1 the batch trains nothing"),
    Metric("trained_tokens", "tokens", "completion tokens of the batch"),
    Metric("spot_check/groups", "comparisons", "comparisons of a rollout worker's log-probabilities in a group with the learner's under one version "
           "(`logger.verify_share`), since the coordinator started", "absent before the first one"),
    Metric("spot_check/largest_difference", "nats", "largest mean difference of a rollout worker: log-probability of the worker minus that of the learner, over "
           "the tokens of the worker's newest compared groups", "within ±0.003"),
    Metric("spot_check/largest_spread", "nats", "largest spread of a rollout worker's log-probabilities around the learner's: root of the "
           "mean square over the tokens of the worker's newest compared groups", "below 0.001 in float32, 0.1 in bfloat16"),
    Metric("spot_check/named_workers", "workers", "rollout workers that a warning named because their log-probabilities are wrong", "0"),
    Metric("spot_check_s", "s", "rank 0's time for the comparisons of the step and for the copy of its weights", "below 1 % of `step_s` on average"),
    Metric("age", "steps", "mean age of the tokens: the step minus the step of the version that sampled them",
           "at most `async_grpo.max_trajectory_age_steps`, except for late groups"),
    Metric("age/<age>", "groups", "groups of this age in the batch"),
    Metric("environment/turns_per_sample", "turns", "mean number of turns of an episode (with `environment`); an episode's tokens count as one completion"),
    Metric("environment/rows_per_sample", "rows", "mean number of transcripts of an episode, which are the sequences that the learner trains",
           "1; more if histories are rewritten or a turn cannot extend the tokens before it"),
    Metric("environment/mixed_version_fraction", "share", "episodes whose tokens are of several versions"),
))  # fmt: skip
LOSS = Part("train", "Loss and policy", "Computed by the learner. Unless a row says otherwise, a value is a mean over the tokens that train.", (
    Metric("loss", "", "the objective, as a mean over the updates of the step", "near 0 for GRPO, where the value alone has no meaning"),
    Metric("advantage_max", "", "largest absolute advantage of a token, before it is clipped by `grpo.advantage_clip_low` and `advantage_clip_high`",
           "below 10 if advantages are divided by the standard deviation, else as large as rewards; above 1000 the run warns"),
    Metric("grad_norm", "", "global norm of the gradient before clipping, as a mean over updates",
           "steady; if peaks exceed ten times the usual value, the learning rate is too high"),
    Metric("lr", "", "learning rate of the step"),
    Metric("skipped_updates", "updates", "updates that were skipped because loss or gradient was not finite", "absent"),
    Metric("entropy", "nats", "entropy of the policy's distribution of the next token", "falls slowly; near 0 exploration is over"),
    Metric("logprob", "nats", "log-probability of the tokens under the current policy"),
    Metric("ratio_behaviour", "", "π/μ: probability under the current policy, divided by the probability under the sampling policy", "0.99 to 1.01"),
    Metric("kl_behaviour", "nats", "estimate of KL(μ‖π) as ratio - 1 - log ratio", "below 0.01; more means old or wrongly scored tokens"),
    Metric("kl_reference", "nats", "KL to the reference policy, by `loss_fn.reference_policy_kl_type`", "below some 0.1 to 1 nat"),
    Metric("kl_teacher", "nats", "log π/π_teacher of the sampled tokens (distillation)", "falls"),
    Metric("clip_fraction", "share", "tokens whose ratio was clipped", "below 0.2"),
    Metric("truncation_fraction", "share", "tokens whose importance weight reached its bound", "below 0.05"),
    Metric("drop_fraction", "share", "tokens that a mask of the correction removed", "below 0.05"),
    Metric("effective_sample_size", "share", "(Σw)²/(N·Σw²) of the importance weights by token", "above 0.9"),
    Metric("effective_sample_size_sequence", "share", "(Σw)²/(N·Σw²) of the importance weights by sequence", "above 0.5"),
))  # fmt: skip
PREFERENCES = Part("train", "Preferences and demonstrations", "Runs on examples (`sft`, `dpo`, `orpo`, `kto`, `rm`).", (
    Metric("preference_loss", "", "part of the loss that the preferences give"),
    Metric("sft_loss", "nats", "part of the loss that the likelihood of the chosen completion gives"),
    Metric("accuracy", "share", "pairs whose chosen completion has the higher reward (`kto`: completions on the correct side of max(0, `batch_kl`))",
           "rises from 0.5"),
    Metric("margin", "reward", "reward of the chosen completion minus reward of the rejected completion", "rises from 0"),
    Metric("chosen_reward", "reward", "mean implicit reward of chosen or desirable completions"),
    Metric("rejected_reward", "reward", "mean implicit reward of rejected or undesirable completions", "below `chosen_reward`"),
    Metric("batch_kl", "nats", "KL to the reference, measured on mismatched completions (`kto`)"),
))  # fmt: skip
VALUES = Part("train", "Value model (PPO)", "With `grpo.advantage: gae`.", (
    Metric("value_loss", "", "loss of the value model, as a mean over updates", "falls, then steady"),
    Metric("value_clip_fraction", "share", "values whose change was clipped"),
    Metric("value_grad_norm", "", "norm of the value model's gradient before clipping"),
    Metric("return", "reward", "mean return of the tokens"),
    Metric("explained_variance", "share", "1 - Var(return - value)/Var(return)", "rises towards 1; below 0 the value model is worse than a constant"),
))  # fmt: skip
WORK = Part("train", "Work and time of the learner", "Seconds are means over ranks.", (
    Metric("time", "s", "wall clock at which the step was recorded, in seconds since 1970", "for the axes of charts"),
    Metric("tokens", "tokens", "tokens of the whole batch that train"),
    Metric("sequences", "sequences", "sequences of the batch"),
    Metric("row_tokens", "tokens", "tokens of the trained sequences, each with its prompt"),
    Metric("computed_tokens", "tokens", "tokens in the packed micro-batches: `row_tokens`, but a shared prompt once in each micro-batch"),
    Metric("micro_batches", "passes", "forward and backward passes of all ranks"),
    Metric("unfilled_fraction", "share", "unused part of the token budget of all passes; the budget of each pass is `policy.train_mb_tokens`, also of the empty passes of ranks with fewer micro-batches",
           "below 0.3; more means that ranks have unequal work, or that `policy.train_mb_tokens` is too large"),
    Metric("teraflop", "10¹² operations", "operations for training the batch, without recomputed operations and those of frozen models"),
    Metric("learner/teraflops", "10¹² operations/s", "`teraflop` divided by `step_s`, for each rank"),
    Metric("learner/mfu", "share", "`learner/teraflops` divided by the GPU's peak in bfloat16 (model FLOPs utilisation)",
           "0.3 to 0.5 for large models; absent on CPUs and unknown GPUs"),
    Metric("learner/peak_gpu_memory_gb", "GB", "largest memory so far of rank 0's tensors on its GPU",
           "as `paceline plan` predicts; absent without GPUs"),
    Metric("learner/collectives_s", "s", "time in the step during which collectives of rank 0 ran; overlapping times count once",
           "absent unless `logger.profile_period` names the step"),
    Metric("learner/exposed_collectives_s", "s", "time in collectives during which rank 0's GPU computed nothing else",
           "below a tenth of `step_s`; absent on CPUs"),
    Metric("loss_scale", "", "scale of the loss after the step, with `policy.precision: float16`",
           "constant or growing; if it keeps falling, gradients are near float16's largest number"),
    Metric("step_s", "s", "time for the whole step"),
    Metric("frozen_s", "s", "part of `step_s`: log-probabilities of frozen policies, and the computation of advantages"),
    Metric("forward_s", "s", "part of `step_s`: forward passes"),
    Metric("backward_s", "s", "part of `step_s`: backward passes"),
    Metric("optimizer_s", "s", "part of `step_s`: the optimizer"),
    Metric("value_s", "s", "part of `step_s`: the value model"),
    Metric("publish_wait_s", "s", "time for which the learner was blocked because a version was staged", "far below `step_s`"),
    Metric("learner_wait_s", "s", "time for which the learner waited for the batch", "near 0; more means that generation or rewards are the bottleneck"),
    Metric("learner/tokens_per_s", "tokens/s", "tokens that train, divided by `step_s`"),
    Metric("learner/queued_checkpoints", "checkpoints", "checkpoints on the learner's disk that wait for an object store",
           "0 or 1; more while the store does not answer, or takes longer than the interval of checkpoints"),
    Metric("learner/store_away_s", "s", "seconds since the object store stopped answering", "0"),
    Metric("learner/spool_bytes", "bytes", "size of the queued checkpoints' files, all ranks together", "below `PACELINE_SPOOL_MB`"),
    Metric("learner/unforeseen_errors", "errors", "unexpected errors of the learner's process since its start", "0"),
))  # fmt: skip
POOLS = Part("train", "Pools", "Sums over the workers of a pool, from each worker's last heartbeat. Tokens and turns per second are means since the "
            "step before, of groups and turns that were committed in this time.", (
    Metric("rollout/tokens_per_s", "tokens/s", "tokens of training and evaluations committed since the step before, per second"),
    Metric("rollout/wait_fraction", "workers", "sum over the workers: share of a worker's time without a lease",
           "near 0; more means that generation waits for weights or for the learner"),
    Metric("rollout/running", "sequences", "sequences in the engines"),
    Metric("rollout/occupied", "workers", "sum over the workers: used share of the engine's capacity",
           "near the number of workers; less means that the workers have too little to do"),
    Metric("rollout/leases", "groups", "groups that the workers have leased"),
    Metric("rollout/unforeseen_errors", "errors", "unexpected errors of the processes since their start", "0"),
    Metric("reward_workers/groups_since_report", "groups", "groups scored since the heartbeat before"),
    Metric("reward_workers/occupied", "workers", "sum over the workers: share of a worker's processes that have a task"),
    Metric("reward_workers/unforeseen_errors", "errors", "unexpected errors of the processes since their start", "0"),
    Metric("environment_workers/turns_per_s", "turns/s", "turns of episodes sampled per second"),
    Metric("environment_workers/tokens_per_s", "tokens/s", "tokens of turns sampled per second"),
    Metric("environment_workers/running", "samples", "episodes of leased groups"),
    Metric("environment_workers/occupied", "workers", "sum over the workers: used share of a worker's capacity for episodes"),
    Metric("environment_workers/leases", "groups", "groups that the workers have leased"),
    Metric("environment_workers/engines", "workers", "sum over the environment workers: rollout workers from which a worker may request turns",
           "not 0 while episodes run"),
    Metric("environment_workers/broken_turns", "turns", "turns whose answer was interrupted since the start of the processes; each was "
           "sampled again", "grows only when rollout workers die"),
    Metric("environment_workers/moved_sessions", "sessions", "conversations that continued at another rollout worker, since the start of the "
           "processes", "grows only when rollout workers leave"),
    Metric("environment_workers/bridge_breaks", "turns", "turns whose conversation could not be extended token by token, so that a new transcript "
           "began, since the start of the processes", "0; more means that the chat template rewrites history"),
    Metric("environment_workers/tool_errors", "calls", "calls of tools that raised an error, had an unknown name or could not be read, "
           "since the start of the processes", "falls as the policy learns"),
    Metric("environment_workers/failed_lives", "lives", "attempts at an episode that a fault of the environment ended, since the start of the "
           "processes", "0"),
    Metric("environment_workers/replayed_lives", "lives", "attempts at an episode that continued from its turn log by repeating the recorded calls"),
    Metric("environment_workers/restored_lives", "lives", "attempts at an episode that continued from the saved state of its environment"),
    Metric("environment_workers/restarted_lives", "lives", "attempts at an episode that could continue neither from a turn log nor from a saved state; the episode's tokens are dropped as `restarted`"),
    Metric("environment_workers/unforeseen_errors", "errors", "unexpected errors of the processes since their start", "0"),
    Metric("<pool>/memory_gb", "GB", "memory of the host that the processes hold (`rollout`, `reward_workers`, "
           "`environment_workers`, `learner`, `coordinator`), without the processes of user code and of vLLM"),
    Metric("<pool>/gpu_memory_gb", "GB", "GPU memory that torch has reserved in the pool's processes", "absent without GPUs"),
    Metric("<pool>/gpu_use", "GPUs", "sum over the GPUs of the pool's processes: share of the time in which a kernel ran; a GPU "
           "counts once for each process that uses it. This and the next metrics of GPUs need nvidia-ml-py", "near the number of GPUs; absent without GPUs"),
    Metric("<pool>/gpu_memory_used_gb", "GB", "memory in use on the GPUs of the pool's processes, including the memory of other processes"),
    Metric("<pool>/gpu_power_w", "W", "power of the GPUs of the pool's processes"),
    Metric("<pool>/gpu_throttled", "GPUs", "GPUs of the pool's processes that are slowed by heat or supply (not by their power cap)", "0"),
    Metric("<pool>/gpu_xid_errors", "errors", "Xid errors of the driver since the start of the processes; the member's log and the page have the "
           "code", "0"),
    Metric("gpu_energy_j", "J", "energy of all GPUs of all members since the step before, each GPU once"),
    Metric("joules_per_trained_token", "J/token", "`gpu_energy_j` divided by `trained_tokens`", "steady"),
    Metric("coordinator/unforeseen_errors", "errors", "unexpected errors of the coordinator since its start", "0"),
))  # fmt: skip
GROUPS = Part("train", "Groups", "Counts from the ledger after the step.", (
    Metric("groups/<state>", "groups", "groups in this state: for an open state the present groups, for an ended state (trained, dropped) all groups since the start"),
    Metric("dropped/<reason>", "groups", "groups dropped so far, by reason: `no_variance`, `stale`, `prompt_too_long`, `bad_prompt` (a "
           "prompt that the chat template refuses, or whose generation failed `max_generation_failures` times), "
           "`invalid_result`, `reward_failed`, `environment_failed`, `poison`, `damaged`, `wrong_weights`, `by_request`, `run_ended`",
           "absent; `no_variance` may appear with `grpo.use_dynamic_sampling`"),
    Metric("epochs", "passes", "prompts drawn so far, divided by the rows of the data set"),
    Metric("failures/<reason>", "attempts", "attempts at generating or scoring that failed so far, by reason", "absent"),
))  # fmt: skip
TRANSFER = Part("train", "Weights in a step's line", "Newest values at the end of the step.", (
    Metric("weights/gather_s", "s", "time for gathering the version from the ranks"),
    Metric("weights/wait_s", "s", "time for which gathering the version blocked training", "far below `step_s`"),
    Metric("weights/transfer_s", "s", "time for the transfer to the member that answered last"),
    Metric("weights/publish_s", "s", "time from staging the version to the answer of the last member"),
    Metric("weights/size_bytes", "bytes", "bytes sent to the member that answered last"),
    Metric("weights/pause_s", "s", "time for which sampling paused at the member that answered last", "below 1"),
    Metric("weights/swap_s", "s", "time of the sampling pause in which the weights were exchanged"),
))  # fmt: skip
EVALUATION = Part("eval", "Evaluation", "One line for each evaluated version; `step` is the version.", (
    Metric("step", "", "version that was evaluated"),
    Metric("reward", "reward", "total reward: mean over prompts of the mean over a prompt's completions", "rises"),
    Metric("reward_stderr", "reward", "standard error of `reward` over prompts", "a change of `reward` of less than twice this value says nothing"),
    Metric("reward/<function>", "reward", "mean reward of one function, before its weight"),
    Metric("reward_stderr/<function>", "reward", "standard error of one function's mean reward over prompts"),
    Metric("pass@<k>/<function>", "share", "prompts of which at least one of k completions got 1, for a function whose values "
           "are all 0 or 1; k is `grpo.val_samples_per_prompt`"),
    Metric("reward_of/<source>", "reward", "mean total reward of the prompts of one source (`data.source_key`)",
           "absent without `data.source_key`"),
    Metric("groups_of/<source>", "prompts", "prompts of the source"),
    Metric("prompts", "prompts", "prompts that were scored"),
    Metric("samples", "completions", "completions that were scored"),
    Metric("failed", "prompts", "prompts that could not be generated or scored", "0"),
    Metric("completion_length", "tokens", "mean length of a completion"),
    Metric("requested_step", "", "version for which the evaluation was due; the evaluated version, `step`, may be later"),
    Metric("loss", "", "objective on held-out examples (runs on examples)", "rises again when the model overfits"),
    Metric("sequences", "sequences", "held-out sequences (only in runs that train on examples); the line also has metrics of a step, such as `accuracy`"),
))  # fmt: skip
VERSIONS = Part("weights", "Weights by version", "One line for each published version; seconds are of the slowest member.", (
    Metric("session", "", "session of the learner that published the version"),
    Metric("epoch", "", "number of the roster of members"),
    Metric("members", "members", "members of the roster when the version was staged"),
    Metric("acknowledged", "members", "members that sample from the version", "equal to `members`"),
    Metric("failures", "transfers", "transfers of the version that failed", "0"),
    Metric("gather_s", "s", "time for gathering the version from the ranks"),
    Metric("wait_s", "s", "time for which gathering the version blocked training"),
    Metric("transfer_s", "s", "time for sending the bytes to a member"),
    Metric("answer_s", "s", "time from the last byte to the member's answer"),
    Metric("publish_s", "s", "time from staging the version to the member's answer"),
    Metric("swap_s", "s", "time for exchanging the weights in a member's engine"),
    Metric("pause_s", "s", "time for which a member's sampling paused"),
    Metric("size_bytes", "bytes", "bytes sent to one member"),
    Metric("hosts", "hosts", "hosts whose relays received the version"),
    Metric("host_s", "s", "time from the plan to the last verified byte of a host"),
    Metric("hop_s", "s", "part of `host_s` for which a host received bytes, without the waits for the previous host", "similar for all hosts"),
    Metric("slowest_hop", "", "position in the chain of the host with the longest `hop_s`"),
    Metric("host_bytes", "bytes", "bytes that all hosts received"),
    Metric("hops_skipped", "hosts", "hosts that other hosts skipped, because the skipped hosts were dead or silent, or sent wrong bytes", "0"),
))  # fmt: skip
STATE = Part("coordinator", "State of the coordinator", "Gauges only for a collector, updated every five seconds; no line of "
             "metrics.jsonl has them.", (
    Metric("members", "members", "members whose stream is open, by `pool` (`rollout`, `reward`, `environment`, `learner`)",
           "above 0 for each pool that the run needs"),
    Metric("needed", "", "1 for each `pool` that the active run needs for its steps, with members or without; else 0"),
    Metric("suspected", "members", "members of the pool that are silent for half the heartbeat time-out", "0"),
    Metric("unable", "members", "members of the pool that cannot work on the active run; `paceline watch` shows the reason", "0"),
    Metric("runs", "runs", "runs of the ledger, by `state`", "`failed` and `paused` do not rise"),
    Metric("step_age_s", "s", "time since the newest step of the run that trains, or since the run began; absent if no run trains",
           "a small multiple of `step_s`"),
    Metric("paused_s", "s", "time since the active run was paused; absent if it is not paused", "absent"),
    Metric("disk_free_bytes", "bytes", "free bytes on the ledger's disk", "above `--min-free-mb` with room for the open groups"),
    Metric("admission_closed", "", "1 while the disk has too little room for new groups", "0"),
    Metric("unforeseen_errors", "errors", "unexpected errors of the coordinator since its start", "0"),
    Metric("insecure", "", "1 while the coordinator listens beyond its host without TLS (`--insecure`)", "0"),
    Metric("memory_gb", "GB", "memory of the host that the coordinator holds"),
))  # fmt: skip
PARTS = (REWARDS, COMPLETIONS, LOSS, PREFERENCES, VALUES, WORK, POOLS, GROUPS, TRANSFER, EVALUATION, VERSIONS, STATE)


def metric_of(kind: str, name: str) -> Metric | None:
    """Return the entry of a metric; None if there is none. An evaluation on examples has a step's metrics."""
    parts = [part for part in PARTS if part.kind == kind or (kind == "eval" and part in (LOSS, PREFERENCES))]
    matching = [metric for part in parts for metric in part.metrics if _matches(metric, name)]
    return min(matching, key=lambda metric: metric.name.count("<"), default=None)


def entries_of(name: str) -> list[tuple[Part, Metric]]:
    """Return the entries of a name, or of a pattern (`reward/*`), with their parts."""
    return [
        (part, metric)
        for part in PARTS
        for metric in part.metrics
        if fnmatchcase(metric.name, name) or _matches(metric, name)
    ]


def _matches(metric: Metric, name: str) -> bool:
    pieces = re.split(r"<\w+>", metric.name)
    return re.fullmatch(".+".join(map(re.escape, pieces)), name) is not None
