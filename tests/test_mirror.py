"""Tests mirror the packages: `tests/learner/step/test_plan.py` tests `learner/step/plan.py`, or the file in `COVERED_BY`
does."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
PACKAGES = ("paceline", "rollout", "reward", "learner", "environment", "services")
MAX_HOPS = 2
"""Modules of the packages between a test and one that it covers. A module's name in a string counts as an import."""

COVERED_BY = {
    "services/rollout/openai/recording.py": "tests/services/model_server/test_serving.py",
    "learner/checkpoints/conversion/dcp.py": "test_folders.py",
    "paceline/weights/sorted_delta_codec.py": "test_delta_codec.py",
    "paceline/registry/calls.py": "tests/services/coordinator/test_model_servicer.py",
    "paceline/registry/signing.py": "test_folder.py",
    "services/cli/registry/facts.py": "test_models.py",
    "services/cli/registry/source.py": "test_models.py",
    "services/coordinator/ledger/integrity/lost_runs.py": "tests/services/coordinator/audit/test_repair.py",
    "services/coordinator/ledger/tables/models.py": "tests/services/coordinator/test_model_servicer.py",
    "services/coordinator/model_registry.py": "test_model_servicer.py",
    "paceline/data/column_names.py": "test_formats.py",
    "paceline/data/example_rows.py": "test_examples.py",
    "paceline/data/json_rows.py": "test_malformed.py",
    "paceline/data/row_checks.py": "test_malformed.py",
    "paceline/data/spooled_rows.py": "test_csv_rows.py",
    "paceline/data/table_rows.py": "test_rows.py",
    "paceline/data/traces/conversion.py": "test_spans.py",
    "paceline/data/preparation/processor_child.py": "test_processor.py",
    "paceline/data/preparation/evaluation_sets.py": "test_prepared.py",
    "paceline/data/preparation/spec_filters.py": "test_prepared.py",
    "paceline/data/exchanges.py": "tests/paceline/data/preparation/test_prepared.py",
    "services/cli/samples_shown.py": "test_data.py",
    "paceline/tls/channels.py": "tests/services/common/test_tls.py",
    "paceline/tls/diagnosis.py": "tests/services/common/test_tls.py",
    "services/common/tls_option.py": "tests/services/common/test_insecure.py",
    "services/coordinator/members/caller_certificate.py": "tests/services/common/test_tls.py",
    "rollout/native/scoring.py": "tests/services/rollout/openai/test_server.py",
    "services/cli/decision.py": "tests/services/cli/recorded/test_trace_comparison.py",
    "services/cli/evaluating/gate.py": "test_evaluate.py",
    "services/cli/evaluating/evaluation_spec.py": "tests/paceline/tasks/test_tasks.py",
    "services/evaluation/harnesses/scored.py": "test_lm_eval.py",
    "services/evaluation/models.py": "test_engine_model.py",
    "services/evaluation/problems.py": "test_runner.py",
    "services/evaluation/summary.py": "test_runner.py",
    "paceline/spec/sections/choices.py": "tests/paceline/data/test_choices.py",
    "paceline/spec/sections/evaluation.py": "tests/services/evaluation/test_runner.py",
    "services/cli/token.py": "tests/services/common/access/test_token_table.py",
    "services/common/access/caller.py": "test_callers.py",
    "services/common/access/locked_json.py": "test_token_table.py",
    "services/common/access/polled_file.py": "test_token_table.py",
    "services/common/error_status.py": "tests/services/common/test_token_guard.py",
    "services/common/access/worker_callers.py": "test_rights.py",
    "services/coordinator/access_servicer.py": "tests/services/common/access/test_rights.py",
    "paceline/spec/sections/offline_grpo.py": "tests/learner/objectives/test_offline_grpo.py",
    "services/cli/recorded/curve_file.py": "test_report.py",
    "services/cli/recorded/report_sections.py": "test_report.py",
    "services/tracking/cursor.py": "test_follower.py",
    "services/tracking/entries.py": "test_follower.py",
    "services/tracking/opening.py": "test_follower.py",
    "services/tracking/tracker.py": "test_follower.py",
    "services/local/page_link.py": "tests/services/dashboard/test_page.py",
    "services/dashboard/pieces.py": "test_gateway.py",
    "services/dashboard/app.py": "test_gateway.py",
    "services/dashboard/backends.py": "test_gateway.py",
    "services/dashboard/methods.py": "test_gateway.py",
    "services/dashboard/openapi.py": "test_gateway.py",
    "services/dashboard/main.py": "test_page.py",
    "paceline/records.py": "tests/services/coordinator/audit/reading/test_reader.py",
    "services/cli/recorded/opening.py": "test_records.py",
    "services/cli/recorded/remote_samples.py": "test_source.py",
    "services/cli/recorded/sample_choice.py": "test_source.py",
    "services/coordinator/audit/sample_sources.py": "tests/services/cli/recorded/test_source.py",
    "services/coordinator/audit/reading/token_numbers.py": "tests/services/coordinator/pool/test_authority.py",
    "services/coordinator/audit/reading/verify_process.py": "tests/services/coordinator/test_records_servicer.py",
    "services/coordinator/audit/reading/completion_filter.py": "test_reader.py",
    "services/coordinator/audit/reading/event_pages.py": "test_reader.py",
    "services/coordinator/audit/reading/group_life.py": "test_reader.py",
    "services/coordinator/audit/reading/lists.py": "test_reader.py",
    "services/coordinator/audit/reading/log_tails.py": "test_reader.py",
    "services/coordinator/audit/reading/metric_series.py": "test_reader.py",
    "services/coordinator/audit/reading/page_tokens.py": "test_reader.py",
    "services/coordinator/audit/reading/sample_pages.py": "test_reader.py",
    "services/coordinator/audit/reading/spec_values.py": "test_reader.py",
    "environment/acting.py": "test_class_episode.py",
    "environment/agent_episode.py": "test_agent_session.py",
    "environment/counts.py": "test_class_episode.py",
    "environment/episodes.py": "test_class_episode.py",
    "environment/hosting/calls.py": "tests/environment/test_class_episode.py",
    "environment/hosting/classes.py": "test_pool.py",
    "environment/hosting/faults.py": "test_pool.py",
    "environment/hosting/launching.py": "test_commands.py",
    "environment/hosting/slots.py": "test_pool.py",
    "environment/hosting/worker.py": "test_pool.py",
    "environment/life.py": "test_class_episode.py",
    "environment/notes.py": "test_agent_session.py",
    "environment/rendering/choosing.py": "test_family.py",
    "environment/rendering/protocol.py": "test_template.py",
    "environment/sample.py": "test_class_episode.py",
    "environment/seeds.py": "test_class_episode.py",
    "environment/setting.py": "test_class_episode.py",
    "learner/batch/layout.py": "tests/learner/model/test_policy.py",
    "learner/batch/validate_examples.py": "test_examples.py",
    "learner/checkpoints/adapter_export.py": "tests/learner/model/test_adapter.py",
    "learner/checkpoints/export_manifest.py": "test_export.py",
    "learner/checkpoints/files.py": "test_checkpoint.py",
    "learner/checkpoints/manifest.py": "test_checkpoint.py",
    "learner/checkpoints/metadata.py": "test_listed_pickle.py",
    "learner/checkpoints/verification.py": "test_checkpoint.py",
    "learner/collectives.py": "tests/services/learner/training/test_run.py",
    "paceline/models/mesh_shape.py": "tests/learner/model/test_mesh.py",
    "paceline/models/auto_settings.py": "test_memory_plan.py",
    "paceline/models/memory_remedies.py": "test_memory_plan.py",
    "paceline/planning/work.py": "test_rates.py",
    "paceline/connection.py": "test_client.py",
    "paceline/rpc_errors.py": "test_client.py",
    "paceline/run_states.py": "test_client.py",
    "paceline/worker_calls.py": "test_client.py",
    "paceline/spec/with_keys.py": "tests/paceline/models/test_memory_plan.py",
    "services/coordinator/scaling/meter.py": "test_scaler.py",
    "services/local/room.py": "tests/services/cli/test_plan.py",
    "learner/weights/store/delta_chunks.py": "test_writer.py",
    "learner/weights/store/version_source.py": "tests/learner/weights/test_device_snapshot.py",
    "paceline/models/tensor_parallel.py": "tests/rollout/weights/test_tensor_part.py",
    "paceline/weights/part_file.py": "tests/learner/weights/store/test_formats.py",
    "rollout/weights/held_weights.py": "test_tensor_part.py",
    "rollout/weights/part_fetcher.py": "test_tensor_part.py",
    "learner/weights/hosts/shard_writer.py": "tests/services/learner/training/test_weight_channel.py",
    "paceline/weights/hosts/local_socket.py": "test_client.py",
    "paceline/weights/hosts/sending.py": "test_reading.py",
    "paceline/weights/hosts/transport.py": "test_reading.py",
    "paceline/weights/nccl_library.py": "test_nccl_link.py",
    "services/common/host_agent.py": "tests/services/learner/training/test_weight_channel.py",
    "services/host_agent/main.py": "tests/paceline/weights/hosts/test_client.py",
    "learner/model/cpu_linear.py": "test_policy.py",
    "learner/objectives/completions.py": "test_kto.py",
    "learner/objectives/grpo.py": "test_policy.py",
    "learner/step/frozen.py": "test_trainer.py",
    "learner/step/gradients.py": "test_trainer.py",
    "learner/step/plan.py": "test_trainer.py",
    "learner/step/stopwatch.py": "test_trainer.py",
    "learner/step/update.py": "test_trainer.py",
    "learner/weights/channel.py": "tests/services/learner/training/test_weight_channel.py",
    "learner/weights/publish_result.py": "tests/learner/weights/store/test_offers.py",
    "learner/weights/shards.py": "tests/learner/weights/store/test_members.py",
    "learner/weights/store/chain.py": "test_offers.py",
    "learner/weights/store/jobs.py": "test_members.py",
    "paceline/array_frames.py": "test_wire.py",
    "paceline/bundle_transfer.py": "tests/services/coordinator/test_bundle_servicer.py",
    "paceline/chat/answers.py": "tests/services/rollout/openai/test_agents.py",
    "paceline/chat/api_errors.py": "tests/services/rollout/openai/test_server.py",
    "paceline/chat/choices.py": "tests/services/rollout/openai/test_server.py",
    "paceline/chat/frames.py": "tests/services/rollout/openai/test_agents.py",
    "paceline/chat/response_frames.py": "tests/services/rollout/openai/test_agents.py",
    "paceline/chat/responses.py": "tests/services/rollout/openai/test_agents.py",
    "paceline/chat/template_probes.py": "test_rendering.py",
    "paceline/chat/token_route.py": "tests/services/rollout/openai/test_agents.py",
    "services/rollout/openai/engine_requests.py": "test_server.py",
    "paceline/chat/preparing.py": "tests/services/rollout/openai/test_agents.py",
    "paceline/chat/requests.py": "tests/services/rollout/openai/test_server.py",
    "paceline/errors.py": "test_wire.py",
    "paceline/files/names.py": "tests/learner/checkpoints/test_export.py",
    "paceline/files/run_folders.py": "tests/services/learner/training/test_checkpoints.py",
    "paceline/groups.py": "test_wire.py",
    "paceline/host/process.py": "tests/learner/weights/test_gather.py",
    "paceline/migration/conversion.py": "test_trl.py",
    "paceline/migration/sources.py": "test_writing.py",
    "paceline/spec/explaining/pages.py": "tests/services/cli/test_reference.py",
    "paceline/spec/presets.py": "tests/paceline/spec/sections/test_loss.py",
    "paceline/spec/run.py": "test_reading.py",
    "paceline/spec/sections/algorithm.py": "tests/paceline/spec/test_reading.py",
    "paceline/spec/sections/base.py": "tests/paceline/spec/test_reading.py",
    "paceline/spec/sections/bundle.py": "tests/paceline/bundle/test_collecting.py",
    "paceline/spec/sections/data.py": "tests/paceline/spec/test_reading.py",
    "paceline/spec/sections/distillation.py": "tests/paceline/spec/test_reading.py",
    "paceline/spec/sections/grpo.py": "tests/paceline/spec/test_reading.py",
    "paceline/spec/sections/policy.py": "tests/paceline/spec/test_reading.py",
    "paceline/spec/sections/supervised.py": "tests/paceline/spec/test_reading.py",
    "paceline/spec/sections/system.py": "tests/paceline/spec/test_reading.py",
    "paceline/spec/sections/vllm.py": "tests/paceline/spec/test_reading.py",
    "paceline/spec/value.py": "test_reading.py",
    "paceline/tracing.py": "tests/e2e/test_tracing.py",
    "paceline/host/capabilities.py": "tests/paceline/user_code/test_box.py",
    "paceline/host/landlock.py": "tests/paceline/user_code/test_box.py",
    "paceline/user_code/child.py": "test_shared_process.py",
    "paceline/user_code/ends.py": "tests/reward/test_runner.py",
    "paceline/user_code/frames.py": "tests/reward/test_runner.py",
    "paceline/user_code/loading.py": "tests/reward/test_loading.py",
    "paceline/user_code/process.py": "tests/reward/test_runner.py",
    "paceline/user_code/spawning.py": "test_shared_process.py",
    "paceline/user_code/surroundings.py": "test_box.py",
    "paceline/weights/lora_names.py": "tests/rollout/weights/test_adapter.py",
    "paceline/weights/packing.py": "test_manifest.py",
    "paceline/weights/store_format.py": "tests/rollout/weights/test_store_receiver.py",
    "reward/builtin/answers.py": "test_mathematics.py",
    "reward/builtin/expressions.py": "test_equality.py",
    "reward/builtin/reward_model.py": "tests/e2e/test_preference_runs.py",
    "reward/code/harness.py": "test_grading.py",
    "reward/code/settings.py": "tests/reward/builtin/test_code_tests.py",
    "reward/judging/settings.py": "tests/reward/builtin/test_judges.py",
    "reward/models/client.py": "test_pool.py",
    "reward/models/settings.py": "test_pool.py",
    "reward/models/texts.py": "test_scorer.py",
    "reward/process.py": "test_runner.py",
    "reward/results.py": "test_runner.py",
    "reward/sandbox/bwrap.py": "test_attacks.py",
    "reward/sandbox/landlock.py": "test_attacks.py",
    "reward/sandbox/launcher.py": "test_attacks.py",
    "reward/sandbox/launching.py": "test_supervisor.py",
    "reward/sandbox/pipes.py": "test_supervisor.py",
    "reward/sandbox/protocol.py": "test_supervisor.py",
    "reward/sandbox/readable.py": "test_choosing.py",
    "reward/sandbox/sandlock.py": "test_attacks.py",
    "reward/sandbox/syscalls.py": "test_seccomp_filter.py",
    "reward/sandbox/unconfined.py": "test_attacks.py",
    "reward/sandbox/usage.py": "test_workspace.py",
    "reward/worker.py": "test_runner.py",
    "rollout/engine.py": "test_engines.py",
    "rollout/native/batch.py": "test_engine.py",
    "rollout/native/kv_cache.py": "test_model.py",
    "rollout/vllm/reports.py": "test_arguments.py",
    "rollout/vllm/requests.py": "test_arguments.py",
    "rollout/vllm/whole_weights.py": "tests/rollout/weights/test_adapter.py",
    "rollout/vllm/worker.py": "test_arguments.py",
    "rollout/weights/layout.py": "test_adapter.py",
    "rollout/weights/store_reader.py": "test_store_receiver.py",
    "services/cli/doctor.py": "test_main.py",
    "services/cli/lazy.py": "test_main.py",
    "services/cli/recorded/replay.py": "tests/e2e/test_replay.py",
    "services/cli/recorded/report_page.py": "test_plot.py",
    "services/cli/render.py": "test_main.py",
    "services/cli/running/runs.py": "tests/services/cli/test_main.py",
    "services/cli/running/train.py": "tests/test_examples.py",
    "services/cli/running/watching.py": "tests/services/cli/test_main.py",
    "services/cli/serve.py": "test_main.py",
    "services/cli/workers.py": "test_main.py",
    "services/common/accepted_calls.py": "tests/services/environment/test_engines.py",
    "services/common/advertise.py": "tests/deploy/test_images.py",
    "services/common/assigned_run.py": "test_run_setup.py",
    "services/common/bundled_spec.py": "tests/services/coordinator/lifecycle/test_run_bundles.py",
    "services/common/grpc_server.py": "test_membership.py",
    "services/common/json_http.py": "tests/services/rollout/openai/test_server.py",
    "services/common/healthcheck.py": "tests/deploy/test_images.py",
    "services/common/options.py": "tests/services/cli/test_main.py",
    "services/common/processes/parent_death.py": "tests/services/learner/test_launcher.py",
    "services/common/processes/quiet_libraries.py": "tests/services/cli/test_serve_model.py",
    "services/common/processes/ready_file.py": "tests/services/coordinator/test_main.py",
    "services/common/processes/supervisor.py": "tests/services/local/test_cluster.py",
    "services/common/processes/tether.py": "tests/services/local/test_cluster.py",
    "services/common/zmq_keepalive.py": "tests/chaos/links/test_silence.py",
    "services/coordinator/audit/artifacts.py": "test_verify.py",
    "services/coordinator/audit/evidence.py": "test_verify.py",
    "services/coordinator/audit/record.py": "test_verify.py",
    "services/coordinator/audit/rescue.py": "test_repair.py",
    "services/coordinator/audit/sample_files.py": "tests/services/cli/recorded/test_samples.py",
    "services/coordinator/audit/samples.py": "tests/services/cli/recorded/test_samples.py",
    "services/coordinator/audit/side_records.py": "test_verify.py",
    "services/coordinator/disk_space.py": "test_main.py",
    "services/coordinator/exchange/batches/selection.py": "test_costs.py",
    "services/coordinator/exchange/lives.py": "test_episodes.py",
    "services/coordinator/exchange/overdue.py": "test_lease_durations.py",
    "services/coordinator/exchange/state.py": "test_any_order.py",
    "services/coordinator/exchange/transport/dispatch.py": "test_server.py",
    "services/coordinator/exchange/transport/isolation.py": "test_server.py",
    "services/coordinator/exchange/transport/parked.py": "test_server.py",
    "services/coordinator/exchange/transport/receiver.py": "test_request_filter.py",
    "services/coordinator/exchange/transport/router_socket.py": "test_connections.py",
    "services/coordinator/exchange/uploads/intake.py": "test_prompt_check.py",
    "services/coordinator/exchange/uploads/prompt_encoder.py": "test_prompt_check.py",
    "services/coordinator/exchange/uploads/turn_checks.py": "tests/services/coordinator/exchange/test_episodes.py",
    "services/coordinator/ledger/backup.py": "test_restored_backup.py",
    "services/coordinator/ledger/balance.py": "tests/services/coordinator/exchange/test_admission.py",
    "services/coordinator/ledger/batch_chain.py": "tests/services/coordinator/exchange/batches/test_delivery.py",
    "services/coordinator/ledger/batch_split.py": "tests/services/coordinator/exchange/batches/test_costs.py",
    "services/coordinator/ledger/connection.py": "test_ledger.py",
    "services/coordinator/ledger/group_queries.py": "test_groups.py",
    "services/coordinator/ledger/integrity/file_check.py": "test_file_damage.py",
    "services/coordinator/ledger/integrity/report.py": "tests/services/coordinator/audit/test_verify.py",
    "services/coordinator/ledger/pruning.py": "tests/services/coordinator/exchange/batches/test_costs.py",
    "services/coordinator/ledger/schema.py": "test_ledger.py",
    "services/coordinator/ledger/tables/audit_heads.py": "tests/services/coordinator/ledger/test_ledger.py",
    "services/coordinator/ledger/tables/batches.py": "tests/services/coordinator/exchange/batches/test_dropping.py",
    "services/coordinator/ledger/tables/checkpoints.py": "tests/services/coordinator/sessions/test_starting_point.py",
    "services/coordinator/ledger/tables/deaths.py": "tests/services/coordinator/exchange/test_quarantine.py",
    "services/coordinator/ledger/tables/episodes.py": "tests/services/coordinator/audit/test_journals.py",
    "services/coordinator/ledger/tables/evaluations.py": "tests/services/coordinator/exchange/test_evaluation.py",
    "services/coordinator/ledger/tables/free_slots.py": "tests/services/coordinator/exchange/test_leases.py",
    "services/coordinator/ledger/tables/receipts.py": "tests/services/coordinator/exchange/batches/test_delivery.py",
    "services/cli/sweeping/study.py": "test_trials.py",
    "services/coordinator/ledger/tables/session_faults.py": "tests/services/coordinator/exchange/batches/test_session_faults.py",
    "services/coordinator/lifecycle/context.py": "test_run_states.py",
    "services/coordinator/lifecycle/coordinator.py": "test_run_states.py",
    "services/coordinator/lifecycle/run_data.py": "test_run_queue.py",
    "services/coordinator/lifecycle/source_files.py": "test_submission_checks.py",
    "services/coordinator/lifecycle/watchers.py": "test_run_states.py",
    "services/coordinator/members/registry.py": "test_senders.py",
    "services/coordinator/pool/assignments.py": "tests/services/coordinator/sessions/test_session_numbers.py",
    "services/coordinator/pool/reports.py": "test_authority.py",
    "services/coordinator/pool/run_events.py": "test_authority.py",
    "services/coordinator/reporting/metrics_files.py": "tests/services/coordinator/lifecycle/test_recovery.py",
    "services/coordinator/reporting/run_log.py": "tests/services/coordinator/lifecycle/test_recovery.py",
    "services/coordinator/reporting/run_messages.py": "tests/services/coordinator/test_servicers.py",
    "services/coordinator/reporting/stall.py": "test_watchdog.py",
    "services/coordinator/serving.py": "test_main.py",
    "services/demo/run.py": "tests/services/cli/test_main.py",
    "services/demo/task.py": "tests/e2e/test_preference_runs.py",
    "services/environment/journal.py": "test_run.py",
    "services/environment/main.py": "tests/e2e/test_environment_runs.py",
    "services/environment/sessions/choices.py": "test_server.py",
    "services/learner/training/checkpoint_uploads.py": "test_checkpoints.py",
    "services/learner/background_loop.py": "tests/services/learner/training/test_batches.py",
    "services/learner/context.py": "tests/services/learner/training/test_batches.py",
    "services/learner/main.py": "tests/e2e/faults/test_drain.py",
    "services/learner/orders.py": "test_servicer.py",
    "services/learner/rank_group.py": "test_launcher.py",
    "services/local/folder_lock.py": "test_cluster.py",
    "services/local/machine_checks.py": "tests/services/cli/test_main.py",
    "services/replay/plan.py": "tests/services/test_replay_plan.py",
    "services/replay/rank.py": "tests/e2e/test_replay.py",
    "services/reward/main.py": "tests/e2e/faults/test_drain.py",
    "services/rollout/gather.py": "tests/services/rollout/openai/test_server.py",
    "services/rollout/group_sampler.py": "test_run.py",
    "services/rollout/main.py": "tests/e2e/faults/test_drain.py",
    "services/rollout/openai/gate.py": "test_server.py",
    "services/rollout/openai/sampling.py": "test_server.py",
}
"""Modules without a test of their name, and the file that exercises each; a bare name is in the mirrored folder."""


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
    files |= {other for path in files for other in references(path) if TESTS in other.parents}
    for _ in range(MAX_HOPS + 1):
        files |= {other for path in files for other in references(path)}
    return files


def covering(module: str) -> Path:
    """The test file of an entry of `COVERED_BY`."""
    test = COVERED_BY[module]
    return ROOT / test if "/" in test else TESTS / Path(module).parent / test


def without_namesake() -> set[str]:
    names = {path.relative_to(ROOT) for path in modules().values() if path.name != "__init__.py"}
    return {str(name) for name in names if not (TESTS / name.with_name(f"test_{name.name}")).is_file()}


def test_every_module_has_a_test_of_its_name_or_stands_in_the_list() -> None:
    assert sorted(without_namesake() - COVERED_BY.keys()) == []


def test_the_list_has_no_module_that_is_gone_or_has_a_test_of_its_name() -> None:
    assert sorted(COVERED_BY.keys() - without_namesake()) == []


def test_each_test_of_the_list_reaches_its_module() -> None:
    wrong = []
    for name in COVERED_BY:
        test = covering(name)
        if not test.is_file():
            wrong.append(f"{test} is missing; it covers {name}")
        elif ROOT / name not in reached(test):
            wrong.append(f"{test} does not reach {name}")
    assert wrong == []


def test_every_test_file_stands_where_what_it_tests_does() -> None:
    """A folder of tests exists in the packages, but for those of whole systems."""
    systems = {"e2e", "chaos", "fuzz", "gpu", "hosts", "weights", "benchmarks", "support", "data"}
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    wrong = [str(each) for each in folders if each.parts and each.parts[0] not in systems]
    assert sorted(each for each in wrong if not (ROOT / each).is_dir()) == []
