"""The page on a long run: a ledger with 10,000 steps and 1,000,000 groups, a real browser, every view.

    python benchmarks/page.py [--steps 10000] [--groups 1000000] [--keep FOLDER] [--no-coordinator] [--json]

The ledger is made by SQL, with stored completions for the groups of the last steps. `paceline serve dashboard` reads it. Each view
is opened in a headless Chromium, its cache warm, and timed in seconds from the change of the address to its heading
(`first_paint_s`) and to its first chart or table (`content_s`). Then the time from a key or a filter to the next frame that shows it
(`interaction_ms`): a zoom on the view of a run, and a search on the view of a spec. With --json the last line is one object with the
worst of each, `console_errors` and `csp_violations`. Needs chromium and playwright. Then, unless --no-coordinator, what an open
page costs a coordinator: `exchange_ratio_with_page` and `coordinator_memory_mb`, by benchmarks/page_reads.py.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from short_form import parse

from paceline.groups import Completion, Group, VersionSpan
from paceline.services.coordinator.ledger.ledger import Ledger
from paceline.spec import RunSpec
from paceline.spec.reading import spec_to_yaml
from paceline.wire import encode_result

RUN = "long-1"
COMPLETIONS, METRICS, STORED_STEPS = 8, 80, 50
SHOWN = {
    "runs": "article.run .spark",
    f"run/{RUN}": ".u-over",
    f"flow/{RUN}": ".u-over",
    f"samples/{RUN}": "table.samples tbody tr",
    f"samples/{RUN}?group=0": ".life li",
    f"books/{RUN}": ".u-over",
    f"compare/{RUN}": ".u-over",
    "members": "main .card",
    f"spec/{RUN}": "dl.spec dt",
}
"""Views, and what each shows when its content is there."""


def make_ledger(folder: Path, steps: int, groups: int) -> Path:
    """Write the ledger of a long run."""
    path = folder / "ledger.sqlite"
    Ledger(path).close()
    spec = RunSpec.model_validate(
        {
            "name": "long",
            "policy": {"model_name": "none", "generation": {"max_new_tokens": 64}},
            "data": {"train": "none.jsonl"},
            "rewards": [{"function": "length"}],
            "grpo": {"num_prompts_per_step": groups // steps, "num_generations_per_prompt": COMPLETIONS},
        }
    )
    db = sqlite3.connect(path)  # without the ledger's triggers, which seal each row
    db.execute(
        "INSERT INTO runs (run_id, sequence, spec_yaml, state, directory, submitted_s, next_step, max_num_steps, session)"
        " VALUES (?, 1, ?, 'succeeded', ?, ?, ?, ?, 1)",
        (RUN, spec_to_yaml(spec), RUN, time.time(), steps, steps),
    )
    rng = np.random.default_rng(0)
    db.executemany("INSERT INTO events (run_id, sequence, kind, json) VALUES (?, ?, 'step', ?)", events(steps, rng))
    a_step, first_stored = groups // steps, steps - STORED_STEPS
    ids = np.arange(8, dtype=np.int32)
    completions = [
        Completion(
            rng.integers(0, 50, 64).astype(np.int32),
            -rng.random(64).astype(np.float32),
            (VersionSpan(1, max(0, steps - 1), 0, 64),),
            "stop",
            "word " * 40,
        )
        for _ in range(COMPLETIONS)
    ]
    arrays, texts = encode_result(ids, completions)
    digest = Group(0, ids, tuple(completions)).digest()
    rewards = rng.random(COMPLETIONS).astype("<f4").tobytes()

    def rows() -> Iterator[tuple[Any, ...]]:
        for number in range(groups):
            yield (
                RUN,
                number,
                number,
                digest,
                rewards,
                float(number % 7) / 7,
                number // a_step,
                number % a_step,
            )

    db.executemany(
        "INSERT INTO groups (run_id, group_id, class, state, slot, attempt, holders, scorers, tokens, oldest_step, digest,"
        " rewards, functions, reward, step, rank_order) VALUES (?, ?, 'train', 'trained', ?, 1, 'rollout-0', 'reward-0', 512, 0,"
        " ?, ?, '[\"length\"]', ?, ?, ?)",
        rows(),
    )
    db.executemany(
        "INSERT INTO prompts (run_id, group_id, prompt_json, columns_json) VALUES (?, ?, ?, '{}')",
        ((RUN, number, f'"prompt {number}"') for number in range(groups)),
    )
    db.executemany(
        "INSERT INTO payloads (run_id, group_id, kind, header, arrays) VALUES (?, ?, 'result', ?, ?)",
        ((RUN, number, texts, arrays) for number in range(first_stored * a_step, groups)),
    )
    counters = {"groups:ever_admitted": groups, "groups:trained": groups, "tokens:generated": groups * 512}
    counters["tokens:trained"] = groups * 512
    db.executemany(
        "INSERT INTO counters (run_id, name, value) VALUES (?, ?, ?)",
        [(RUN, name, value) for name, value in counters.items()],
    )
    db.commit()
    db.close()
    return path


def events(steps: int, rng: np.random.Generator) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of the events, with as many metrics as a real run has."""
    named = (
        "reward",
        "loss",
        "age",
        "kl_behaviour",
        "entropy",
        "grad_norm",
        "lr",
        "step_s",
        "learner_wait_s",
    )
    names = [*named, "rollout/tokens_per_s", "groups/trained", *(f"other/{i}" for i in range(METRICS))]
    for step in range(steps):
        values = dict(zip(names, rng.random(len(names)).tolist(), strict=True))
        yield RUN, step + 1, json.dumps({"step": step, "time": 1.7e9 + step} | values)


def measure(link: str) -> dict[str, Any]:
    """Return the times of each view."""
    from playwright.sync_api import sync_playwright

    base, said = link.partition("/#")[0], list[str]()
    views: dict[str, dict[str, float]] = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.on("console", lambda m: said.append(m.text) if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(link)
        page.wait_for_selector("main h1", timeout=60_000)
        for view, content in list(SHOWN.items()) * 2:  # the second round counts
            page.goto("about:blank")
            started_s = time.perf_counter()
            page.goto(f"{base}/#/{view}", wait_until="commit")
            page.wait_for_selector("main h1", timeout=60_000)
            painted_s = time.perf_counter() - started_s
            page.wait_for_selector(content, timeout=60_000)
            views[view] = {"first_paint_s": painted_s, "content_s": time.perf_counter() - started_s}
        interactions = list(interact(page, base))
        browser.close()
    return {
        "views": views,
        "first_paint_s": max(view["first_paint_s"] for view in views.values()),
        "content_s": max(view["content_s"] for view in views.values()),
        "interaction_ms": max(interactions),
        "console_errors": len(said),
        "csp_violations": sum("Content Security Policy" in text for text in said),
    }


def interact(page: Any, base: str) -> Iterator[float]:
    """Yield the milliseconds from an action to the frame after it, as the page itself measures them."""
    frame = (
        "(act) => new Promise((resolve) => { const began = performance.now(); eval; requestAnimationFrame(() => "
        "requestAnimationFrame(() => resolve(performance.now() - began))); document.querySelector(act).dispatchEvent("
        "new Event(act === 'main' ? 'showall' : 'input')); })"
    ).replace(" eval;", "")
    page.goto(f"{base}/#/run/{RUN}")
    page.wait_for_selector(".u-over", timeout=60_000)
    page.wait_for_timeout(1000)
    yield page.evaluate(frame, "main")
    yield page.evaluate(frame, "input[type=range]")
    page.goto(f"{base}/#/spec/{RUN}")
    page.wait_for_selector("input[type=search]", timeout=60_000)
    page.wait_for_timeout(500)
    yield page.evaluate(frame, "input[type=search]")


def main() -> None:
    """Make the ledger, start the page, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--groups", type=int, default=1_000_000)
    parser.add_argument("--keep", type=Path, help="folder for the ledger; one that is there is used again")
    parser.add_argument("--no-coordinator", action="store_true", help="measure the page alone")
    parser.add_argument("--json", action="store_true")
    options = parse(parser, steps=20, groups=200, no_coordinator=True)
    if options.short and shutil.which("chromium") is None:
        print("skipped: chromium is not on the path", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "ledger.sqlite").exists():
            started_s = time.perf_counter()
            make_ledger(folder, options.steps, options.groups)
            print(f"made the ledger in {time.perf_counter() - started_s:.0f} s", flush=True)
        command = [
            sys.executable,
            "-m",
            "paceline.apps.dashboard.main",
            "--directory",
            str(folder),
            "--port",
            "0",
        ]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            link = server.stdout.readline().split()[-1]
            try:
                found = measure(link)
            finally:
                server.terminate()
        if not options.no_coordinator:
            from page_reads import ROUNDS, SECONDS, WORKERS, measure_memory, measure_throughput

            found |= measure_throughput(Path(temporary) / "exchange", WORKERS, SECONDS, ROUNDS)
            found |= measure_memory(folder, 5 * SECONDS)
    for view, times in found["views"].items():
        print(f"{view:24} first paint {times['first_paint_s']:.2f} s, content {times['content_s']:.2f} s")
    print(f"worst interaction {found['interaction_ms']:.0f} ms, {found['console_errors']} console errors")
    if not options.no_coordinator:
        print(
            f"exchange with the page over without {found['exchange_ratio_with_page']:.3f}, coordinator's memory "
            f"{found['coordinator_memory_mb']:+.1f} MB"
        )
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
