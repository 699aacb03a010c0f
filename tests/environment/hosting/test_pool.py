"""User code in real processes: both contracts, and every way in which it can fail, each alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from paceline.environment.hosting.classes import load_class, load_tools, schema_of
from paceline.environment.hosting.pool import SampleDeaths, UserCode
from paceline.environment.protocols import EnvironmentFailed, EnvironmentLost, ServiceAway, TimeIsUp
from paceline.errors import InvalidInput, Unreadable
from paceline.spec.sections.user_code import EnvironmentSection

pytestmark = pytest.mark.asyncio(loop_scope="module")

CODE = '''
import asyncio, os, signal, sqlite3, threading, time

class Counter:
    def reset(self, start=0, **columns):
        self.base = sqlite3.connect(":memory:")  # refuses to be used on another thread
        self.count = start
        return f"from {start}"

    def add(self, n: int) -> int:
        """
        Add.

        Args:
            n: what to add
        """
        self.base.execute("select 1")
        self.count += n
        return self.count

    async def wait(self, seconds: float) -> str:
        """
        Wait.

        Args:
            seconds: how long
        """
        await asyncio.sleep(seconds)
        return "waited"

    async def meet(self, number: int) -> str:
        """
        Wait until so many calls are under way in this process.

        Args:
            number: how many
        """
        Counter.met = getattr(Counter, "met", 0) + 1
        while Counter.met < number:
            await asyncio.sleep(0.01)
        return "met"

    def misbehave(self, how: str) -> str:
        """
        Misbehave.

        Args:
            how: in which way
        """
        if how == "raise":
            raise ValueError("no good")
        if how == "exit":
            raise SystemExit(3)
        if how == "os_exit":
            os._exit(5)
        if how == "hang":
            time.sleep(3600)
        if how == "hold":  # the interpreter, in C
            sum(range(10**13))
        if how == "memory":
            return str(len(bytearray(4 << 30)))
        if how == "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "fork":
            return "child" if os.fork() == 0 else "parent"
        return how

    async def fork(self) -> str:
        """Fork on the loop."""
        return "child" if os.fork() == 0 else "parent"

    def get_reward(self):
        return self.count / 2

    def _private(self):
        return None

class Steps:
    deterministic = True
    def reset(self, word):
        self.word = word
    def step(self, text):
        return f"you said {text}", 0.5, text == self.word
    def save(self):
        return {"word": self.word}
    def load(self, state):
        self.word = state["word"]

class Nonsense:
    def reset(self, what):
        self.what = what
        return 3 if what == "reset" else None
    def step(self, text):
        return {"two": ("a", 1.0), "text": (7, 1.0, True), "nan": ("a", float("nan"), True), "done": ("a", 1.0, "yes"),
                "five": ("a", 1, False, True, {}), "dict": {"observations": [{"content": "b"}], "reward": None, "done": True},
                "away": None}[self.what]
    async def get_reward(self):
        if self.what == "away":
            raise ConnectionRefusedError("port 9")
        return "much"

async def solve(row, base_url, api_key):
    if row["how"] == "forever":
        await asyncio.sleep(3600)
    if row["how"] == "raise":
        raise KeyError("answer")
    return row["value"] if base_url.endswith("/v1") else None

def train_call(messages, tools):
    return messages[0]["content"] != "title"
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("code") / "code.py"
    path.write_text(CODE)
    return path


Section = Callable[..., EnvironmentSection]


@asynccontextmanager
async def running(path: Path, name: str = "Counter", **settings: Any) -> AsyncIterator[UserCode]:
    section = EnvironmentSection.model_validate({"class": f"{path}:{name}", "memory_mb": 1024, **settings})
    async with UserCode(section, num_processes=1) as code:
        yield code


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def counter(file: Path) -> AsyncIterator[UserCode]:
    """`Counter` for all tests of this file: what one of them does to its process leaves the pool usable for the next."""
    async with running(file, call_timeout_s=3.0) as code:
        yield code


async def misbehave(code: UserCode, how: str, time_left_s: float = 60.0) -> list[dict[str, Any]]:
    instance, _ = await code.open("", {}, 60, SampleDeaths())
    try:
        return (await instance.tools([("misbehave", {"how": how})], time_left_s))[0]
    finally:
        instance.close()


async def test_methods_are_tools_with_their_schemas(counter: UserCode) -> None:
    facts = counter.classes[""]
    assert [tool["function"]["name"] for tool in facts.tools] == [
        "add",
        "fork",
        "meet",
        "misbehave",
        "wait",
    ]
    parameters = facts.tools[0]["function"]["parameters"]
    assert parameters["properties"]["n"] == {"type": "integer", "description": "what to add"}
    assert (facts.steps, facts.deterministic, facts.saves, facts.rewards) == (False, False, False, True)
    instance, text = await counter.open("", {"start": 3, "other": 1}, 60, SampleDeaths())
    assert text == "from 3"
    calls = [
        ("add", {"n": 2}),
        ("wait", {"seconds": 0}),
        ("nothing", {}),
        ("add", {"m": 2}),
        ("add", 5),
        ("add", {"n": 1}),
    ]
    results, state = await instance.tools(calls, 60)
    assert state == ""
    assert [result["result"] for result in results[:3]] == [
        "5",
        "waited",
        "{'error': 'Tool nothing not found.'}",
    ]
    assert "unexpected keyword argument" in results[3]["result"]
    assert [bool(result.get("raised")) for result in results] == [False, False, True, True, True, False]
    assert await instance.reward(60) == 3.0


TOOLS = '''
def multiply(a: int, b: int) -> int:
    """
    Product of two numbers.

    Args:
        a: one factor
        b: the other factor
    """
    return a * b

async def add_slowly(a: int, b: int) -> int:
    """
    Sum of two numbers.

    Args:
        a: one number
        b: the other number
    """
    return a + b

def add(n: int) -> int:
    """
    Has a name that the class has too.

    Args:
        n: a number
    """
    return n

def bare(a):
    return a
'''


async def test_functions_are_tools_alone_and_beside_a_class(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "tools.py"
    path.write_text(TOOLS)
    tools = [f"{path}:multiply", f"{path}:add_slowly"]
    calls = [("multiply", {"a": 6, "b": 7}), ("add_slowly", {"a": 1, "b": 2}), ("multiply", {"a": 1})]
    async with UserCode(EnvironmentSection.model_validate({"tools": tools}), num_processes=1) as code:
        assert [tool["function"]["name"] for tool in code.classes[""].tools] == ["multiply", "add_slowly"]
        instance, text = await code.open("", {"row": 1}, 60, SampleDeaths())
        assert text is None
        results, _ = await instance.tools(calls, 60)
        assert [result["result"] for result in results[:2]] == ["42", "3"]
        assert results[2]["raised"]
    async with running(file, tools=tools) as code:
        facts = code.classes[""]
        names = [tool["function"]["name"] for tool in facts.tools]
        assert names == ["add", "fork", "meet", "misbehave", "wait", "multiply", "add_slowly"]
        instance, _ = await code.open("", {}, 60, SampleDeaths())
        results, _ = await instance.tools([("multiply", {"a": 2, "b": 2}), ("add", {"n": 2})], 60)
        assert [result["result"] for result in results] == ["4", "2"]
    with pytest.raises(InvalidInput, match=r"environment\.tools\.0: there are two tools called 'add'"):
        load_tools([f"{path}:add"], [facts])
    (bare,) = load_tools([f"{path}:bare"], [facts]).values()
    with pytest.raises(InvalidInput, match=r"environment\.tools: 'bare' has no schema"):
        schema_of(bare, "environment.tools: 'bare'")


async def test_a_class_with_step_has_no_tools_and_keeps_its_state(file: Path) -> None:
    async with running(file, "Steps") as code:
        facts = code.classes[""]
        assert (facts.steps, facts.deterministic, facts.saves, facts.tools) == (True, True, True, [])
        instance, text = await code.open("", {"word": "yes", "prompt": "?"}, 60, SampleDeaths())
        assert text is None
        assert await instance.step("no", 60) == (
            {"observation": "you said no", "reward": 0.5, "done": False},
            'j{"word": "yes"}',
        )
        restored = await code.restore("", 'j{"word": "no"}', 60, SampleDeaths())
        assert (await restored.step("no", 60))[0]["done"] is True
        assert await restored.reward(60) is None


async def outcome_of(code: UserCode, what: str) -> str:
    """The fault of an episode of nonsense; empty where there is none."""
    try:
        instance, _ = await code.open("", {"what": what}, 60, SampleDeaths())
        step, _ = await instance.step("a", 60)
    except EnvironmentFailed as error:
        return str(error)
    assert step["done"] is True
    with pytest.raises(EnvironmentFailed, match="get_reward returned the reward str 'much'"):
        await instance.reward(60)
    return ""


async def test_nonsense_is_named(file: Path) -> None:
    async with running(file, "Nonsense") as code:
        for what, fault in {
            "reset": "reset returned int 3",
            "two": "it must return (observation, reward, done)",
            "text": "the observation int 7",
            "nan": "reward nan; it must be finite",
            "done": "str 'yes' as `done`",
            "missing": "raised KeyError",
        }.items():
            assert fault in await outcome_of(code, what)
        assert [await outcome_of(code, what) for what in ("five", "dict")] == ["", ""]
        instance, _ = await code.open("", {"what": "away"}, 60, SampleDeaths())
        with pytest.raises(ServiceAway, match="get_reward could not reach a service: ConnectionRefusedError"):
            await instance.reward(60)
        with pytest.raises(EnvironmentFailed, match="reset needs what, but the data set has no such column"):
            await code.open("", {"prompt": ""}, 60, SampleDeaths())


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ("os_exit", "misbehave: the process ended its process with exit code 5"),
        ("exit", "misbehave raised SystemExit"),
        ("memory", "ran out of memory, memory_mb is 1024"),
        ("hang", "misbehave timed out after 3 s"),
        pytest.param("hold", "misbehave timed out after 3 s", marks=[pytest.mark.merge, pytest.mark.slow]),
    ],
)
async def test_a_fault_of_one_episode_leaves_the_pool_usable(counter: UserCode, how: str, fault: str) -> None:
    beside, _ = await counter.open("", {"start": 1}, 60, SampleDeaths())
    with pytest.raises(EnvironmentFailed, match=fault.replace("(", "[(]")):
        await misbehave(counter, how)
    try:
        assert (await beside.tools([("add", {"n": 1})], 60))[0] == [{"result": "2"}]
        assert how in ("exit", "hang")
    except EnvironmentLost:
        assert how in ("os_exit", "memory", "hold")
    beside.close()
    assert (await misbehave(counter, "ok"))[0]["result"] == "ok"


async def test_what_a_tool_raises_is_its_result_and_a_forked_child_never_answers(counter: UserCode) -> None:
    assert await misbehave(counter, "raise") == [{"result": "{'error': 'no good'}", "raised": True}]
    assert (await misbehave(counter, "fork"))[0]["result"] == "parent"
    instance, _ = await counter.open("", {}, 60, SampleDeaths())
    assert (await instance.tools([("fork", {})], 60))[0][0]["result"] == "parent"
    assert (await instance.tools([("add", {"n": 1})], 60))[0][0]["result"] == "1"
    with pytest.raises(TimeIsUp, match="while wait ran"):
        await instance.tools([("wait", {"seconds": 60})], 0.2)
    assert (await instance.tools([("add", {"n": 1})], 60))[0][0]["result"] == "2"


async def test_calls_of_one_process_overlap(counter: UserCode) -> None:
    instances = [(await counter.open("", {}, 60, SampleDeaths()))[0] for _ in range(8)]
    replies = await asyncio.gather(*(each.tools([("meet", {"number": 8})], 60) for each in instances))
    assert [results[0]["result"] for results, _ in replies] == ["met"] * 8


async def test_a_killed_process_counts_for_nobody_until_it_happens_again_and_again(counter: UserCode) -> None:
    deaths = SampleDeaths()
    outcomes = []
    for _ in range(3):
        instance, _ = await counter.open("", {}, 60, deaths)
        try:
            await instance.tools([("misbehave", {"how": "kill"})], 60)
        except (EnvironmentFailed, EnvironmentLost) as error:
            outcomes.append(type(error).__name__)
        instance.close()
    assert outcomes == ["EnvironmentLost", "EnvironmentLost", "EnvironmentFailed"]


async def test_episodes_beside_a_dying_call_are_lost_and_not_blamed(counter: UserCode) -> None:
    beside, _ = await counter.open("", {}, 60, SampleDeaths())
    running_call = asyncio.create_task(beside.tools([("wait", {"seconds": 60})], 60))
    await asyncio.sleep(0)
    with pytest.raises((EnvironmentFailed, EnvironmentLost)):
        await misbehave(counter, "segfault")
    with pytest.raises(EnvironmentLost):
        await running_call


async def test_agents_and_their_choice_of_calls(file: Path) -> None:
    section = EnvironmentSection(agent=f"{file}:solve", train_call=f"{file}:train_call")
    async with UserCode(section, num_processes=1) as code:
        deaths = SampleDeaths()
        assert await code.solve({"how": "", "value": 2}, "http://x/v1", "key", deaths) == 2.0
        with pytest.raises(EnvironmentFailed, match="the agent raised KeyError: 'answer'"):
            await code.solve({"how": "raise"}, "http://x/v1", "key", deaths)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await code.solve({"how": "forever"}, "http://x/v1", "key", deaths)
        assert await code.trains([{"content": "title"}], [], deaths) is False
        assert await code.trains([{"content": "?"}], [], deaths) is True


@pytest.mark.parametrize(
    ("name", "source", "error", "message"),
    [
        (
            "Contr",
            "class Control:\n    def reset(self): ...",
            InvalidInput,
            "has no class 'Contr', did you mean 'Control'",
        ),
        ("A", "class A:\n    def rest(self): ...", InvalidInput, "has no method 'reset', did you mean 'rest'"),
        ("A", "def A(): ...", InvalidInput, "not a class"),
        ("A", "import no_such_module", Unreadable, "fails to import: ModuleNotFoundError"),
    ],
)
async def test_a_class_that_cannot_be_loaded_is_named(
    tmp_path: Path, name: str, source: str, error: type[Exception], message: str
) -> None:
    (tmp_path / "code.py").write_text(source)
    with pytest.raises(error, match=message):
        load_class(f"{tmp_path}/code.py:{name}")


@pytest.mark.parametrize(
    ("name", "source", "error", "message"),
    [
        ("Missing", "", Unreadable, "there is no file"),
        (
            "A",
            "class A:\n    def reset(self): ...\n    def tool(self, x): ...",
            InvalidInput,
            "the tool 'tool' of A has no schema",
        ),
        ("A", "x = bytearray(1 << 33)", InvalidInput, "MemoryError"),
        (
            "A",
            "import os; os._exit(3)",
            InvalidInput,
            "ended its process with exit code 3 while it loaded the code",
        ),
    ],
)
async def test_code_that_cannot_be_loaded_is_refused_with_the_fault(
    tmp_path: Path, name: str, source: str, error: type[Exception], message: str
) -> None:
    path = tmp_path / "code.py"
    if source:
        path.write_text(source)
    with pytest.raises(error, match=message):
        async with running(path, name):
            pass
