"""Makes the inputs of the two specs beside this file: ./model, ./data/train.jsonl and ./data/validation.jsonl.

The model is a two-layer Qwen3 with random weights and a tokenizer of twelve characters; the data are all sums of two
numbers below 100. Each row has a prompt, the completion of a teacher that errs in half of the cases (for sft.yaml), and
the right answer (for the reward). You do not need this file with your own model and data.
"""

from pathlib import Path

from paceline.services.demo.task import make_model, write_data

HERE = Path(__file__).resolve().parent
SEED = 0

write_data(HERE / "data", SEED)
make_model(HERE / "model", seed=SEED)
print(f"{HERE}: model/ and data/ exist; next: paceline up sft.yaml")
