"""The answer to a command or an option that Paceline does not have: what another library's word stands for, or a near
name."""

from __future__ import annotations

from collections.abc import Iterable

MEANT = {
    "train": "up",
    "run": "up",
    "start": "up",
    "launch": "up",
    "rl": "up",
    "ppo": "up",
    "main_ppo": "up",
    "run_grpo": "grpo",
    "run_grpo_math": "grpo",
    "run_sft": "sft",
    "sft_trainer": "sft",
    "run_dpo": "dpo",
    "run_rm": "rm",
    "reward": "rm",
    "reward_trainer": "rm",
    "run_distillation": "distillation",
    "distill": "distillation",
    "gkd": "distillation",
    "sample": "samples",
    "rollouts": "samples",
    "completions": "samples",
    "verify": "ledger verify",
    "check": "ledger verify",
    "fsck": "ledger verify",
    "backup": "ledger backup",
    "logs": "watch",
    "log": "watch",
    "tail": "watch",
    "follow": "watch",
    "progress": "watch",
    "list": "runs",
    "ls": "runs",
    "jobs": "runs",
    "ps": "runs",
    "workers": "members",
    "nodes": "members",
    "stop": "cancel",
    "kill": "cancel",
    "delete": "cancel",
    "abort": "cancel",
    "continue": "resume",
    "restart": "resume",
    "infer": "generate",
    "predict": "generate",
    "complete": "generate",
    "merge": "convert",
    "model_merger": "convert",
    "convert_dcp_to_hf": "export",
    "quantize": "convert",
    "save": "export",
    "push": "models push",
    "upload": "models push",
    "register": "models register",
    "promote": "models promote",
    "deploy": "models fetch",
    "config": "spec",
    "validate": "spec",
    "explain": "spec",
    "init": "import",
    "migrate": "import",
    "vllm-serve": "serve rollout",
    "inference": "serve rollout",
    "rollout": "serve rollout",
    "worker": "serve rollout",
    "learner": "serve learner",
    "trainer": "serve learner",
    "orchestrator": "serve coordinator",
    "coordinator": "serve coordinator",
    "server": "serve coordinator",
    "env": "doctor",
    "health": "doctor",
    "install": "doctor",
    "evaluate": "eval",
    "run_eval": "eval",
    "benchmark": "eval",
    "tune": "sweep",
    "hpo": "sweep",
}
"""Words for a command in other libraries and command lines, and ours."""


def remedy(word: str, commands: Iterable[str]) -> str:
    """Return the sentence for an unknown command, such as "did you mean `paceline samples`?"."""
    from paceline.spec.explaining.nearest import nearest

    known = list(commands)
    plain = word.rpartition("/")[2].removesuffix(".py").removesuffix(".sh").lower()
    if plain in known:
        return f"did you mean `paceline {plain}`?"
    meant = MEANT.get(plain, "")
    if meant.partition(" ")[0] in known:
        return f"did you mean `paceline {meant}`?"
    guesses = nearest(plain, known)
    if guesses:
        return f"did you mean {' or '.join(f'`paceline {guess}`' for guess in guesses)}?"
    return "`paceline --help` lists the commands"


def setting_for(option: str) -> str:
    """Return the clause for an unknown option that is a setting: `--learning_rate` is an override here; else empty."""
    from paceline.spec.explaining.faults import unknown_key
    from paceline.spec.foreign.names import look_up
    from paceline.spec.keys import keys

    name = option.lstrip("-").replace("-", "_")
    if name in keys():
        return f"; a setting is written as {name}=VALUE"
    if look_up(name) is None and not any(path.endswith(f".{name}") for path in keys()):
        return ""
    (line,) = unknown_key((name,), None)
    return f"; a setting is written as SECTION.KEY=VALUE, and {line.replace(f'{name}: unknown key; ', '')}"
