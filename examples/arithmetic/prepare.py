"""Makes what the two specs beside this file read: ./model, ./data/train.jsonl and ./data/validation.jsonl.

The model is a two-layer Qwen3 with random weights and a tokenizer of twelve characters; the data are all sums of two
numbers below 100. Each row has a prompt, the completion of a teacher who errs in half of the cases (for sft.yaml), and
the right answer (for the reward). With a model and data of your own this file is not needed.
"""

from pathlib import Path

from paceline.services.demo.task import make_model, write_data

HERE = Path(__file__).resolve().parent
SEED = 0

write_data(HERE / "data", SEED)
make_model(HERE / "model", seed=SEED)
print(f"{HERE}: model/ and data/ are there; next: paceline up sft.yaml")
