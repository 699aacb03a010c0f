"""Messages for wrong values: the values that the key takes, and the one to write."""

from __future__ import annotations

import pytest

from paceline.errors import SpecError
from paceline.spec.reading import apply_override, parse_spec


def refusal(override: str) -> str:
    tree = {"policy": {"model_name": "m"}, "data": {"train": "d"}, "rewards": [{"function": "length"}]}
    apply_override(tree, override)
    with pytest.raises(SpecError) as caught:
        parse_spec(tree)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("grpo.max_num_steps=true", "grpo.max_num_steps: must be an integer (got True)"),
        ("grpo.max_num_steps=yes", "grpo.max_num_steps: must be an integer (got True)"),
        ("policy.optimizer.lr=true", "policy.optimizer.lr: must be a number (got True)"),
        ("policy.optimizer.betas=[true,0.9]", "policy.optimizer.betas: must be a number (got [True, 0.9])"),
        ("grpo.max_num_steps=1:30", "grpo.max_num_steps: must be an integer (got '1:30')"),
        ("rewards.0.timeout_s=1e300", "rewards.0: timeout_s is 1e+300, but must be at most 1e+09"),
        ("rewards.0.memory_mb=9e18", "rewards.0: memory_mb is 9e+18, but must be at most 4.39805e+12"),
        (
            "grpo.num_prompts_per_step=4611686018427387904",
            "grpo.num_prompts_per_step 4611686018427387904 × num_generations_per_prompt 8 × "
            "(async_grpo.max_trajectory_age_steps 1 + 1) are 73786976294838206464 completions under way, but at most "
            "2147483647 are possible; reduce one of them",
        ),
        *(
            (
                f"rewards.0.function={name}",
                f"rewards.0.function: is '{name}', but must be a built-in's name or path/to/file.py:function",
            )
            for name in (":f", "x.py:1f", "x.py:f g")
        ),
        ("priority=1e30", "priority: must be an integer of at most 64 bits (got 1e+30)"),
        ("grpo.seed=many", "grpo.seed: must be an integer (got 'many')"),
        ("grpo.seed=1.5", "grpo.seed: must be an integer (got 1.5)"),
        ("grpo.seed=-1", "grpo.seed: must be greater than or equal to 0 (got -1)"),
        ("grpo.val_at_end=maybe", "grpo.val_at_end: must be true or false (got 'maybe')"),
        ("policy.optimizer.lr=high", "policy.optimizer.lr: must be a number (got 'high')"),
        ("policy.optimizer.betas=0.9", "policy.optimizer.betas: must be a list (got 0.9)"),
        ("policy.optimizer.betas=[0.9]", "policy.optimizer.betas: must have 2 values (got [0.9])"),
        ("loss_fn.veto=[]", "loss_fn.veto: must have 2 values (got [])"),
        (
            "rewards=[{function: 'f.py:g', weight_schedule: [[0]]}]",
            "rewards.0.weight_schedule.0: must have more values (got [0])",
        ),
        ("data.train=[]", "data.train: must have at least 1 value (got [])"),
        ("data.choices={keys: []}", "data.choices.keys: must have at least 1 value (got [])"),
        (
            "policy.generation.stop_strings=[a, '']",
            "policy.generation.stop_strings.1: must have at least 1 character (got '')",
        ),
        (
            f"logger.trackers=[{{kind: wandb, project: {'x' * 129}}}]",
            "logger.trackers.0.project: must have at most 128 characters (got 'xxxxxxxxxxxx...xxxxxxxxxxxxx')",
        ),
        (
            "data.prompt_template=Human: {input}",
            "data.prompt_template: must be a text; put it into quotes, because YAML reads this value as a mapping "
            "(got {'Human': {'input': None}})",
        ),
        ("generation.model_name=x", "generation.model_name: unknown key; write policy.model_name or value.model_name"),
        (
            "eval.num_tests_per_prompt=16",
            "eval.num_tests_per_prompt: unknown key; NeMo RL's 'eval.num_tests_per_prompt' is grpo.val_samples_per_prompt in Paceline",
        ),
        ("loss_fn.veto=[1,2,3]", "loss_fn.veto: must have 2 values (got [1, 2, 3])"),
        (
            "policy.scheduler=cosine",
            "policy.scheduler: is a section: keys with values, such as name: … (got 'cosine')",
        ),
        ("policy.generation.vllm_kwargs=3", "policy.generation.vllm_kwargs: must be a mapping (got 3)"),
        ("data.train=3", "data.train: must be text or list (text) (got 3)"),
        ("data.prompt_key=3", "data.prompt_key: must be a text (got 3)"),
        (
            "policy.precision=bf16",
            "policy.precision: must be one of 'auto', 'float32', 'bfloat16', 'float16'; write bfloat16 (got 'bf16')",
        ),
        (
            "policy.precision=bfloat-16",
            "policy.precision: must be one of 'auto', 'float32', 'bfloat16', 'float16'; did you mean 'bfloat16'? (got 'bfloat-16')",
        ),
        ("policy.generation.top_k=null", "policy.generation.top_k: must be an integer; write 0 (got None)"),
        (
            "rewards=length",
            "rewards: is a list of {function: …}; write rewards=[{function: length}] (got 'length')",
        ),
        (
            "rewards=[length]",
            "rewards.0: is a section {function: …}; write {function: length} (got 'length')",
        ),
        (
            "checkpointing.metric_name=best",
            "checkpointing.metric_name: must be val: or train: with a metric after it, such as val:reward or train:loss "
            "(got 'best')",
        ),
    ],
)
def test_a_fault_is_in_our_words(override: str, message: str) -> None:
    assert refusal(override) == message


def test_a_forbidden_name_is_explained_without_a_regular_expression() -> None:
    assert refusal("name=my run/1") == (
        "name: may have at most 63 letters, digits, dots, dashes and underscores, ' ' '/' not; "
        "write name=my-run-1 (got 'my run/1')"
    )
    assert "the first one a letter or a digit" in refusal("name=-x")
    assert "[A-Za-z" not in refusal("name=-x")


def test_no_fault_of_a_plain_key_is_in_the_words_of_pydantic() -> None:
    for value in ("{a: 1}", "[1]", "text", "1.5", "null", "true"):
        for key in (
            "grpo.seed",
            "name",
            "policy.optimizer.lr",
            "algorithm",
            "cluster.learner_gpus",
            "loss_fn.veto",
        ):
            try:
                assert "Input should" not in refusal(f"{key}={value}")
            except pytest.fail.Exception:  # the key takes that value
                continue
