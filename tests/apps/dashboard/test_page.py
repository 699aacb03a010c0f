"""The page in a real headless browser: every view of a run that trains and of one that has ended, filters, zoom, a run that is
cancelled, hostile text, accessibility, the content security policy. Skipped where playwright or Chromium is missing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from trained_ledger import RUN_ID, Writer

from paceline.client import Client, RunState
from paceline.services.coordinator.reporting.member_files import path_of
from paceline.services.local.cluster import LocalCluster, start_page
from paceline.spec import ClusterSection
from paceline.v1 import worker_pb2

HOSTILE = (
    '<img src=x onerror="document.title=1"><script>document.title="owned"</script>'
    "\x1b[31mred\x1b]0;owned\x07 safe\u202egnp.exe " + "long" * 250_000
)
WAIT_MS = 20_000
ENDED = "sums-0"
AXE_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]


@dataclass
class Browser:
    """A page of the dashboard, and what its console said."""

    page: Any
    base: str
    said: list[str] = field(default_factory=list)

    def open(self, view: str) -> None:
        """Open a view and wait until it is shown, with what it asks for."""
        self.page.goto(f"{self.base}/#/{view}")
        self.page.wait_for_selector(f'main[data-shown="#/{view}"]', timeout=WAIT_MS)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalCluster, str]]:
    """A coordinator with a run that trains and one that has ended, and the link of its page."""
    directory = tmp_path_factory.mktemp("page")
    writer = Writer(directory, str(directory / "model"), {"prompt": HOSTILE, "answer": "2"})
    writer.train_a_step()
    with writer.ledger.transaction():
        for step in range(60):
            content = {"step": step, "time": 1.7e9 + step, "reward": step / 60, "age": 1.0, "loss": 0.5}
            writer.ledger.add_event(
                RUN_ID, "step", content | {"rollout/wait_fraction": 0.5, "step_s": 1.0, "logged/kind": 0.5}
            )
        writer.ledger.add_event(RUN_ID, "warning", {"message": HOSTILE[:300]})
        spec_yaml = writer.ledger.run(RUN_ID)["spec_yaml"].replace("max_num_steps: 2", "max_num_steps: 3")
        spec_yaml = spec_yaml.replace("name: sums", "name: totals")
        writer.ledger.add_run(ENDED, spec_yaml, str(directory / "runs" / ENDED), 2)
        writer.ledger.update_run(ENDED, state="failed", message=HOSTILE[:200], next_step=1)
        content = {"step": 0, "time": 1.7e9, "reward": 0.5, "age": 0.5625, "step_s": 0.0932}
        writer.ledger.add_event(ENDED, "step", content)
    writer.ledger.close()
    _add_readings(directory / "runs" / "gauges")
    _add_token_numbers(directory / "runs")
    links: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PACELINE_TOKEN_FILE", raising=False)
        found = LocalCluster(directory / "runs", ClusterSection(), say=lambda line: None)
        patch.setenv("PACELINE_TOKEN_FILE", str(found.token_file))
        try:
            found.start_coordinator()
            said = _Said(links)
            start_page(found, "127.0.0.1", said)
            assert said.is_there.wait(60)
            yield found, links[0].removeprefix("page at ")
        finally:
            found.stop()


def _add_readings(folder: Path) -> None:
    """Write what members did while the run trained: two rollout workers that take weights now and then, one of which goes away."""
    folder.mkdir()
    with (folder / f"gauges-{int(1.7e18):020d}.jsonl").open("w") as file:
        for number in range(12):
            updating, away = 0.1 if number % 3 == 0 else 0.0, float(number > 7)
            shares = {
                "pool": "rollout",
                "working": 0.7 - updating,
                "waiting": 0.3,
                "updating": updating,
                "away": 0.0,
            }
            gone = {
                "pool": "rollout",
                "working": 0.6 * (1 - away),
                "waiting": 0.4 * (1 - away),
                "updating": 0.0,
                "away": away,
            }
            reward = {"pool": "reward", "working": 0.2, "waiting": 0.8, "updating": 0.0, "away": 0.0}
            members = {"rollout-0": shares, "rollout-1": gone, "reward-0": reward}
            file.write(json.dumps({"time": 1.7e9 + 5 * number, "members": members}) + "\n")


def _add_token_numbers(directory: Path) -> None:
    """Write what the learner computed of the tokens of the step's group, whose sampler was unsure of them all."""
    report = worker_pb2.TokenStatistics(run_id=RUN_ID, session=1, step=0)
    report.completions.add(group_id=0, index=0, logprobs=[0.0, math.nan], entropies=[1.2, math.nan])
    report.completions.add(group_id=0, index=1, logprobs=[0.0, -0.1, -9.0], entropies=[0.0, 0.7, 9.0])
    path = path_of(directory, RUN_ID, 0)
    path.parent.mkdir(parents=True)
    path.write_bytes(report.SerializeToString())


class _Said:
    """Collects lines, and says when one is there."""

    def __init__(self, lines: list[str]):
        import threading

        self._lines, self.is_there = lines, threading.Event()

    def __call__(self, line: str) -> None:
        self._lines.append(line)
        self.is_there.set()


@pytest.fixture(params=[(1280, "light"), (390, "dark")], ids=["wide-light", "phone-dark"])
def browser(request: pytest.FixtureRequest, chromium: Any, cluster: tuple[LocalCluster, str]) -> Iterator[Browser]:
    width, scheme = request.param
    context = chromium.new_context(viewport={"width": width, "height": 850}, color_scheme=scheme)
    found = _opened(context, cluster[1])
    yield found
    context.close()
    assert found.said == []


def _opened(context: Any, link: str) -> Browser:
    found = Browser(context.new_page(), link.partition("/#")[0])
    found.page.on("console", lambda m: found.said.append(m.text) if m.type in ("error", "warning") else None)
    found.page.on("pageerror", lambda error: found.said.append(str(error)))
    found.page.goto(link)
    found.page.wait_for_selector("main article", timeout=WAIT_MS)
    return found


VIEWS = [
    "runs",
    f"run/{RUN_ID}",
    f"flow/{RUN_ID}",
    f"samples/{RUN_ID}",
    f"samples/{RUN_ID}?group=0",
    f"books/{RUN_ID}",
]
VIEWS += [f"compare/{RUN_ID}", "members", f"spec/{RUN_ID}"]
VIEWS += [f"{view}/{ENDED}" for view in ("run", "flow", "samples", "books", "compare", "spec")]


def test_flow_shows_what_the_pools_did_over_time(browser: Browser) -> None:
    browser.open(f"flow/{RUN_ID}")
    browser.page.wait_for_selector("figure .uplot", timeout=WAIT_MS)
    labels = browser.page.eval_on_selector_all(
        "figure [role=img]", "found => found.map(one => one.getAttribute('aria-label'))"
    )
    (rollout,) = [label for label in labels if label.startswith("Rollout workers [share of the time]")]
    assert "generate: last 0.35, from 0.3 to 0.65" in rollout
    assert "update weights: last 0, from 0 to 0.05" in rollout
    assert "away: last 0.5, from 0 to 0.5" in rollout
    assert any(label.startswith("Reward workers [share of the time]. score: last 0.2") for label in labels)


def test_tokens_are_coloured_by_what_the_learner_made_of_them(browser: Browser) -> None:
    browser.open(f"samples/{RUN_ID}?group=0")
    shades = "found => found.map(one => one.className)"
    browser.page.get_by_label("Colour of tokens").select_option("entropy")
    browser.page.wait_for_selector(".tokens", timeout=WAIT_MS)
    assert browser.page.eval_on_selector_all(".tokens span", shades) == ["p2", "", "p0", "p1", "p5"]
    browser.page.get_by_label("Colour of tokens").select_option("ratio")
    browser.page.get_by_text("darker is further from 1").first.wait_for(timeout=WAIT_MS)
    first, last = (browser.page.locator(".tokens span").nth(n).get_attribute("title") for n in (0, 4))
    assert "by the learner 0, ratio" in first
    assert "by the learner -9, ratio 1.69e-4" in last
    assert "entropy 9" in last
    assert browser.page.eval_on_selector_all(".tokens span", shades)[4] == "p5"
    browser.page.get_by_label("Colour of tokens").select_option("logprob")
    browser.page.get_by_text("each shade is a factor of e").first.wait_for(timeout=WAIT_MS)


def test_every_view_is_shown_fits_and_is_accessible(browser: Browser) -> None:
    import axe_playwright_python

    (folder,) = axe_playwright_python.__path__ or [""]
    axe = (Path(folder) / "axe.min.js").read_text()
    for view in VIEWS:
        browser.open(view)
        assert "This cannot be shown" not in browser.page.inner_text("main"), view
        assert browser.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, view
        browser.page.evaluate(axe)
        options = {"runOnly": {"type": "tag", "values": AXE_TAGS}}
        found = browser.page.evaluate("(options) => axe.run(document, options)", options)
        serious = [
            (view, each["id"], each["nodes"][0]["html"][:200])
            for each in found["violations"]
            if each["impact"] in ("serious", "critical")
        ]
        assert serious == []


def test_facts_have_few_digits_and_their_nouns_agree(browser: Browser) -> None:
    browser.open("runs")
    browser.page.locator("article dt", has_text="step takes").nth(1).wait_for(timeout=WAIT_MS)
    facts = browser.page.eval_on_selector_all(
        "article.run",
        "runs => runs.map(run => Object.fromEntries([...run.querySelectorAll('dl > div')].map("
        "fact => [fact.firstChild.innerText, fact.lastChild.innerText])))",
    )
    assert [(run["age"], run["step takes"]) for run in facts] == [("0.56 steps", "0.093 s"), ("1 step", "1 s")]


def test_the_reason_of_an_end_is_on_one_line(browser: Browser) -> None:
    browser.open(f"samples/{RUN_ID}")
    lines = """() => [...document.querySelectorAll('table.samples tbody td:nth-child(7)')].map(cell => {
        cell.textContent = 'length'
        const range = document.createRange()
        range.selectNodeContents(cell)
        return new Set([...range.getClientRects()].map(rect => rect.top)).size
    })"""
    shown = browser.page.locator("table.samples th", has_text="ended").is_visible()
    assert browser.page.evaluate(lines) == [int(shown)] * 2


def test_a_column_of_the_table_of_specs_has_one_alignment(browser: Browser) -> None:
    browser.open(f"compare/{RUN_ID}?with={ENDED}")
    table = browser.page.get_by_role("region", name="Differences of the specs")
    table.wait_for(timeout=WAIT_MS)
    assert table.locator("tbody tr").all_inner_texts() == ['name\t"sums"\t"totals"', "grpo.max_num_steps\t2\t3"]
    alignments = "cells => [...new Set(cells.map(cell => getComputedStyle(cell).textAlign))]"
    assert table.locator("th, td").evaluate_all(alignments) in (["left"], ["start"], ["left", "start"])


def test_hostile_text_is_only_text(browser: Browser) -> None:
    for view in (f"samples/{RUN_ID}", f"samples/{RUN_ID}?group=0", f"run/{RUN_ID}", "runs", f"run/{ENDED}"):
        browser.open(view)
        browser.page.locator("main", has_text="<script>").wait_for(timeout=WAIT_MS)
        text = browser.page.inner_text("main")
        assert '<script>document.title="owned"</script>' in text, view
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "\\u202egnp" in text, view
        assert browser.page.evaluate("document.querySelectorAll('main img, main script').length") == 0
        assert "owned" not in browser.page.title()
    browser.open(f"samples/{RUN_ID}?group=0")
    browser.page.get_by_role("button", name="show all 1,0").first.click()
    assert len(browser.page.inner_text("main pre")) > 1_000_000


def test_filters_lead_to_a_group_and_its_life(browser: Browser) -> None:
    browser.open(f"samples/{RUN_ID}")
    page = browser.page
    assert page.locator("table.samples tbody tr").count() == 2
    page.get_by_label("least tokens").fill("3")
    page.get_by_role("button", name="Show", exact=True).click()
    page.locator("p.hint", has_text="1 completion in 1 group").wait_for(timeout=WAIT_MS)
    assert page.locator("table.samples tbody tr").count() == 1
    page.locator("table.samples tbody a").first.click()
    page.get_by_role("heading", name=f"Group 0 of {RUN_ID}").wait_for(timeout=WAIT_MS)
    assert "trained: step 0, by rank 0 of session 1" in page.inner_text("main")
    page.get_by_label("Colour of tokens").select_option("version")
    page.locator(".tokens span.v1").first.wait_for(timeout=WAIT_MS)
    assert page.locator(".tokens").nth(1).locator("span").count() == 3


TICKS = [
    ([1e-4, 1.5e-4, 5e-5], ["1.0e-4", "1.5e-4", "5.0e-5"]),
    ([0.9998, 1, 1.0002], ["0.9998", "1", "1.0002"]),
    ([0, 20, 40], ["0", "20", "40"]),
    ([0.999999975, 1, 1.000000025], ["0.999999975", "1", "1.000000025"]),
    ([None, 10_000, 12_500], ["", "1.00e+4", "1.25e+4"]),
    ([250], ["250"]),
    ([None, 0], ["", "0"]),
]


def test_ticks_differ_and_an_axis_of_one_value_is_near_it(browser: Browser) -> None:
    call = "async ([name, values]) => (await import('/static/charts.js'))[name](...values)"
    for values, texts in TICKS:
        assert browser.page.evaluate(call, ["labels", [values]]) == texts
    assert browser.page.evaluate(call, ["extent", [0, 0]]) == [0, 1]
    assert browser.page.evaluate(call, ["extent", [3, 3]]) == [2.7, 3.3]


@pytest.mark.parametrize(
    ("xs", "log", "limits"),
    [([1, 4, 11], False, [0.7, 11.3]), ([1, 4, 10], True, [0.93, 10.72]), ([3], False, None), ([3], True, None)],
)
def test_the_first_and_the_last_point_are_not_cut(
    browser: Browser, xs: list[float], log: bool, limits: list[float] | None
) -> None:
    # The page's policy forbids `eval`, which Playwright's `wait_for_function` needs from its second look on.
    found = browser.page.evaluate(
        """async ([xs, log, limit_ms]) => {
            const { ChartGroup } = await import('/static/charts.js')
            const group = new ChartGroup()
            const line = { label: 'trials', xs, ys: xs, dots: true }
            document.body.append(group.figure('History', [line], { log }))
            const end_ms = performance.now() + limit_ms
            while (!(group.charts[0]?.scales.x.max > 0) && performance.now() < end_ms) {
                await new Promise(requestAnimationFrame)
            }
            const { min, max } = group.charts[0].scales.x
            return [min, max]
        }""",
        [xs, log, WAIT_MS],
    )
    assert found[0] < xs[0] <= xs[-1] < found[1]
    assert limits in (None, [round(limit, 2) for limit in found])


def test_values_that_a_reward_logged_have_a_chart(browser: Browser) -> None:
    browser.open(f"run/{RUN_ID}")
    assert browser.page.locator("figcaption", has_text="Logged by rewards").count() == 1


def test_zoom_is_shared_by_all_charts(browser: Browser) -> None:
    browser.open(f"run/{RUN_ID}")
    page = browser.page
    page.locator(".u-over").nth(1).wait_for(timeout=WAIT_MS)
    shown = page.locator(".plot canvas")
    before = [shown.nth(i).screenshot() for i in range(2)]
    box = page.locator(".u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 40, steps=5)
    page.mouse.up()
    page.mouse.move(2, 2)
    zoomed = [shown.nth(i).screenshot() for i in range(2)]
    assert all(a != b for a, b in zip(before, zoomed, strict=True))
    page.keyboard.press("Escape")
    assert [shown.nth(i).screenshot() for i in range(2)] == before


def test_keys_choose_views(browser: Browser) -> None:
    browser.open(f"run/{RUN_ID}")
    browser.page.keyboard.press("8")
    browser.page.locator("dl.spec dt").first.wait_for(timeout=WAIT_MS)
    browser.page.keyboard.press("/")
    browser.page.keyboard.type("max_num_steps")
    assert "grpo.max_num_steps" in browser.page.inner_text("main")


def test_verify_shows_its_result(browser: Browser) -> None:
    browser.open(f"books/{ENDED}")
    browser.page.get_by_role("button", name="Verify").click()
    browser.page.locator("text=All records agree").or_(browser.page.locator("text=problems")).wait_for(timeout=60_000)


def test_a_reader_cannot_cancel_and_an_operator_does(chromium: Any, cluster: tuple[LocalCluster, str]) -> None:
    from paceline.services.common.access.page_keys import Access, Role

    running, link = cluster
    base = link.partition("/#")[0]
    context = chromium.new_context()
    reader = _opened(context, f"{base}/#key={Access(running.token_file).key(Role.READER)}")
    assert RUN_ID in reader.page.inner_text("main")
    assert reader.page.get_by_role("button", name="Cancel").count() == 0
    context.close()

    context = chromium.new_context()
    operator = _opened(context, link)
    card = operator.page.locator("article", has_text=RUN_ID)
    card.get_by_role("button", name="Cancel").click()
    operator.page.get_by_role("button", name="Keep it").click()
    card.get_by_role("button", name="Cancel").click()
    operator.page.locator("dialog").get_by_role("button", name="Cancel").click()
    card.locator(".state", has_text="cancelled").wait_for(timeout=WAIT_MS)
    assert operator.said == []
    context.close()
    with Client(running.address) as client:
        assert RunState.of(client.get(RUN_ID)) is RunState.CANCELLED


def test_without_a_key_the_page_asks_for_one(chromium: Any, cluster: tuple[LocalCluster, str]) -> None:
    running, link = cluster
    context = chromium.new_context()
    page = context.new_page()
    page.goto(link.partition("#")[0])
    page.get_by_label("Key or token").fill(running.token_file.read_text().strip())
    page.get_by_role("button", name="Enter").click()
    page.locator("main article").first.wait_for(timeout=WAIT_MS)
    assert RUN_ID in page.inner_text("main")
    context.close()
