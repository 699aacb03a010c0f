"""Tests mirror the packages: `learner/step/plan.py` is tested by `tests/learner/step/test_plan.py`, or by the file that stands
in `COVERED_BY`."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
PACKAGES = ("paceline", "rollout", "reward", "learner", "services")
MAX_HOPS = 2
"""Modules between a test and one that it covers. A module's name in a string counts as an import."""

COVERED_BY = {
    "learner/batch/layout.py": "learner/model/test_policy.py",
    "learner/batch/validate_examples.py": "learner/batch/test_examples.py",
    "learner/checkpoints/adapter_export.py": "learner/model/test_adapter.py",
    "learner/checkpoints/export_manifest.py": "learner/checkpoints/test_export.py",
    "learner/checkpoints/files.py": "learner/checkpoints/test_checkpoint.py",
    "learner/checkpoints/manifest.py": "learner/checkpoints/test_checkpoint.py",
    "learner/checkpoints/metadata.py": "learner/checkpoints/test_listed_pickle.py",
    "learner/collectives.py": "services/learner/test_run.py",
    "learner/model/attention.py": "learner/model/test_policy.py",
    "learner/model/cpu_linear.py": "learner/model/test_policy.py",
    "learner/step/gradients.py": "learner/step/test_trainer.py",
    "learner/step/plan.py": "learner/step/test_trainer.py",
    "learner/step/reference.py": "learner/objectives/test_per_algorithm.py",
    "learner/step/stopwatch.py": "learner/step/test_trainer.py",
    "learner/step/update.py": "learner/step/test_trainer.py",
    "learner/weights/channel.py": "services/learner/test_weights.py",
    "learner/weights/collective.py": "services/learner/test_weights.py",
    "learner/weights/delta.py": "services/learner/test_weights.py",
    "learner/weights/member_link.py": "learner/weights/test_publisher.py",
    "learner/weights/publish_result.py": "learner/weights/test_store_offers.py",
    "learner/weights/shards.py": "learner/weights/test_store_members.py",
    "learner/weights/staged.py": "learner/weights/test_publisher.py",
    "learner/weights/store_chain.py": "learner/weights/test_store_offers.py",
    "learner/weights/store_jobs.py": "learner/weights/test_store_members.py",
    "paceline/errors.py": "paceline/test_wire.py",
    "paceline/files/run_folders.py": "learner/checkpoints/test_export.py",
    "paceline/groups.py": "paceline/test_wire.py",
    "paceline/host_memory.py": "learner/weights/test_gather.py",
    "paceline/models.py": "learner/model/test_policy.py",
    "paceline/process.py": "learner/weights/test_gather.py",
    "paceline/spec/base.py": "paceline/spec/test_reading.py",
    "paceline/spec/data.py": "paceline/spec/test_reading.py",
    "paceline/spec/distillation.py": "paceline/spec/test_reading.py",
    "paceline/spec/grpo.py": "paceline/spec/test_reading.py",
    "paceline/spec/policy.py": "paceline/spec/test_reading.py",
    "paceline/spec/presets.py": "paceline/spec/test_loss.py",
    "paceline/spec/run.py": "paceline/spec/test_reading.py",
    "paceline/spec/supervised.py": "paceline/spec/test_reading.py",
    "paceline/spec/system.py": "paceline/spec/test_reading.py",
    "paceline/spec/value.py": "paceline/spec/test_reading.py",
    "paceline/spec/vllm.py": "paceline/spec/test_reading.py",
    "paceline/spec/warnings.py": "paceline/spec/test_reading.py",
    "paceline/tracing.py": "e2e/test_tracing.py",
    "paceline/weights/link.py": "rollout/weights/test_link_receiver.py",
    "paceline/weights/lora_names.py": "rollout/weights/test_adapter.py",
    "paceline/weights/packing.py": "paceline/weights/test_manifest.py",
    "paceline/weights/shared_memory_link.py": "learner/weights/test_publisher.py",
    "paceline/weights/store_format.py": "rollout/weights/test_store_receiver.py",
    "reward/builtin/answers.py": "reward/builtin/test_mathematics.py",
    "reward/builtin/inputs.py": "reward/builtin/test_formats.py",
    "reward/builtin/reward_model.py": "e2e/test_preference_runs.py",
    "reward/process.py": "reward/test_runner.py",
    "reward/protocol.py": "reward/test_runner.py",
    "reward/results.py": "reward/test_runner.py",
    "reward/worker.py": "reward/test_runner.py",
    "rollout/engine.py": "rollout/test_engines.py",
    "rollout/native/batch.py": "rollout/native/test_engine.py",
    "rollout/native/kv_cache.py": "rollout/native/test_model.py",
    "rollout/vllm/reports.py": "rollout/vllm/test_arguments.py",
    "rollout/vllm/requests.py": "rollout/vllm/test_arguments.py",
    "rollout/vllm/update.py": "rollout/vllm/test_arguments.py",
    "rollout/vllm/whole_weights.py": "rollout/weights/test_adapter.py",
    "rollout/vllm/worker.py": "rollout/vllm/test_arguments.py",
    "rollout/weights/layout.py": "rollout/weights/test_adapter.py",
    "rollout/weights/store_reader.py": "rollout/weights/test_store_receiver.py",
    "services/cli/doctor.py": "services/cli/test_main.py",
    "services/cli/lazy.py": "services/cli/test_main.py",
    "services/cli/render.py": "services/cli/test_main.py",
    "services/cli/replay.py": "e2e/test_replay.py",
    "services/cli/runs.py": "services/cli/test_main.py",
    "services/cli/serve.py": "services/cli/test_main.py",
    "services/cli/train.py": "test_examples.py",
    "services/cli/up.py": "services/cli/test_main.py",
    "services/cli/watching.py": "services/cli/test_main.py",
    "services/cli/workers.py": "services/cli/test_main.py",
    "services/common/advertise.py": "test_deploy.py",
    "services/common/exponential_backoff.py": "services/common/test_run_setup.py",
    "services/common/grpc_server.py": "services/common/test_membership.py",
    "services/common/healthcheck.py": "test_deploy.py",
    "services/common/options.py": "services/cli/test_main.py",
    "services/common/processes/parent_death.py": "services/learner/test_launcher.py",
    "services/common/processes/ready_file.py": "services/coordinator/test_main.py",
    "services/common/processes/supervisor.py": "services/local/test_cluster.py",
    "services/common/processes/tether.py": "services/local/test_cluster.py",
    "services/common/zmq_keepalive.py": "chaos/test_silence.py",
    "services/coordinator/audit/artifacts.py": "services/coordinator/audit/test_verify.py",
    "services/coordinator/audit/evidence.py": "services/coordinator/audit/test_verify.py",
    "services/coordinator/audit/record.py": "services/coordinator/audit/test_verify.py",
    "services/coordinator/audit/rescue.py": "services/coordinator/audit/test_repair.py",
    "services/coordinator/audit/samples.py": "services/cli/test_records.py",
    "services/coordinator/audit/side_records.py": "services/coordinator/audit/test_verify.py",
    "services/coordinator/exchange/batches/selection.py": "services/coordinator/exchange/batches/test_costs.py",
    "services/coordinator/exchange/new_groups.py": "services/coordinator/exchange/test_leases.py",
    "services/coordinator/exchange/overdue.py": "services/coordinator/exchange/test_lease_ages.py",
    "services/coordinator/exchange/rewards.py": "services/coordinator/exchange/test_evaluation.py",
    "services/coordinator/exchange/state.py": "services/coordinator/exchange/test_any_order.py",
    "services/coordinator/exchange/transport/dispatch.py": "services/coordinator/exchange/transport/test_server.py",
    "services/coordinator/exchange/transport/router_socket.py": "services/coordinator/exchange/transport/test_connections.py",
    "services/coordinator/exchange/uploads/intake.py": "services/coordinator/exchange/uploads/test_prompt_check.py",
    "services/coordinator/exchange/uploads/prompt_encoder.py": "services/coordinator/exchange/uploads/test_prompt_check.py",
    "services/coordinator/ledger/backup.py": "services/coordinator/ledger/test_restored_backup.py",
    "services/coordinator/ledger/balance.py": "services/coordinator/exchange/test_admission.py",
    "services/coordinator/ledger/batch_chain.py": "services/coordinator/exchange/batches/test_delivery.py",
    "services/coordinator/ledger/batch_split.py": "services/coordinator/exchange/batches/test_costs.py",
    "services/coordinator/ledger/connection.py": "services/coordinator/ledger/test_ledger.py",
    "services/coordinator/ledger/integrity/file_check.py": "services/coordinator/ledger/integrity/test_file_damage.py",
    "services/coordinator/ledger/integrity/report.py": "services/coordinator/audit/test_verify.py",
    "services/coordinator/ledger/pruning.py": "services/coordinator/exchange/batches/test_costs.py",
    "services/coordinator/ledger/schema.py": "services/coordinator/ledger/test_ledger.py",
    "services/coordinator/lifecycle/coordinator.py": "services/coordinator/lifecycle/test_passed_over.py",
    "services/coordinator/members/registry.py": "services/coordinator/members/test_senders.py",
    "services/coordinator/memory.py": "services/coordinator/exchange/transport/test_connections.py",
    "services/coordinator/pool/assignments.py": "services/coordinator/sessions/test_session_numbers.py",
    "services/coordinator/pool/reports.py": "services/coordinator/pool/test_authority.py",
    "services/coordinator/pool/run_events.py": "services/coordinator/pool/test_authority.py",
    "services/coordinator/reporting/metrics_files.py": "services/coordinator/lifecycle/test_worker_faults.py",
    "services/coordinator/reporting/run_log.py": "services/coordinator/lifecycle/test_worker_faults.py",
    "services/coordinator/reporting/run_messages.py": "services/coordinator/test_servicers.py",
    "services/coordinator/reporting/stall.py": "services/coordinator/reporting/test_watchdog.py",
    "services/demo/curve.py": "services/cli/test_main.py",
    "services/demo/model.py": "services/rollout/test_run.py",
    "services/demo/run.py": "services/cli/test_main.py",
    "services/demo/task.py": "e2e/test_preference_runs.py",
    "services/learner/background_loop.py": "services/learner/test_batches.py",
    "services/learner/context.py": "services/learner/test_batches.py",
    "services/learner/main.py": "e2e/test_drain.py",
    "services/learner/orders.py": "services/learner/test_servicer.py",
    "services/learner/rank_group.py": "services/learner/test_launcher.py",
    "services/local/folder_lock.py": "services/local/test_cluster.py",
    "services/local/machine_checks.py": "services/cli/test_main.py",
    "services/replay/plan.py": "services/test_replay_plan.py",
    "services/replay/rank.py": "e2e/test_replay.py",
    "services/reward/main.py": "e2e/test_drain.py",
    "services/rollout/gather.py": "services/rollout/openai/test_server.py",
    "services/rollout/main.py": "e2e/test_drain.py",
    "services/rollout/openai/answers.py": "services/rollout/openai/test_server.py",
    "services/rollout/openai/gate.py": "services/rollout/openai/test_server.py",
    "services/rollout/openai/messages.py": "services/rollout/openai/test_server.py",
    "services/rollout/openai/requests.py": "services/rollout/openai/test_server.py",
    "services/rollout/openai/sampling.py": "services/rollout/openai/test_server.py",
}
"""Modules without a test file of their name, and the file under `tests/` that exercises each."""


def modules() -> dict[str, Path]:
    """Every module of the packages by its dotted name, `__init__` files by that of their package."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def helpers() -> dict[str, Path]:
    """Modules that tests import from each other, by name."""
    return {
        path.stem: path for path in TESTS.rglob("*.py") if not path.name.startswith(("test_", "conftest"))
    }


KNOWN = modules() | helpers()


@cache
def references(path: Path) -> frozenset[Path]:
    """The files that a file imports or names in a string."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import():
                names |= {alias.name for alias in node.names}
            case ast.ImportFrom():
                names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
            case ast.Constant(value=str(text)) if len(text) < 200:
                names |= {
                    word.partition(":")[0] for word in text.split()
                }  # services and commands start by name
    names |= {name.rpartition(".")[0] for name in names}  # of a class in a module
    return frozenset(KNOWN[name] for name in names if name in KNOWN)


def reached(test: Path) -> set[Path]:
    """The files within `MAX_HOPS` of a test and of the fixtures of its folders."""
    fixtures = [parent / "conftest.py" for parent in test.parents if TESTS in parent.parents]
    files = {test, *(path for path in fixtures if path.is_file())}
    for _ in range(MAX_HOPS + 1):
        files |= {other for path in files for other in references(path)}
    return files


def without_namesake() -> set[str]:
    names = {path.relative_to(ROOT) for path in modules().values() if path.name != "__init__.py"}
    return {str(name) for name in names if not (TESTS / name.with_name(f"test_{name.name}")).is_file()}


def test_every_module_has_a_test_of_its_name_or_stands_in_the_list() -> None:
    assert sorted(without_namesake() - COVERED_BY.keys()) == []


def test_the_list_has_no_module_that_is_gone_or_has_a_test_of_its_name() -> None:
    assert sorted(COVERED_BY.keys() - without_namesake()) == []


def test_each_test_of_the_list_reaches_its_module() -> None:
    wrong = []
    for name, test in COVERED_BY.items():
        if not (TESTS / test).is_file():
            wrong.append(f"{test} is missing; it covers {name}")
        elif ROOT / name not in reached(TESTS / test):
            wrong.append(f"{test} does not reach {name}")
    assert wrong == []


def test_every_test_file_stands_where_what_it_tests_does() -> None:
    """A folder of tests exists in the packages, but for those of whole systems."""
    systems = {"e2e", "chaos", "fuzz", "weights", "benchmarks", "support", "data"}
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    wrong = [str(each) for each in folders if each.parts and each.parts[0] not in systems]
    assert sorted(each for each in wrong if not (ROOT / each).is_dir()) == []
