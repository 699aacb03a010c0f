"""The names of files and folders on which the coordinator, the learner and the commands must agree."""

from __future__ import annotations

LEDGER_NAME = "ledger.sqlite"
"""The ledger, in the coordinator's directory."""

BLOBS_NAME = "blobs"
"""The files of the runs' bundles, in the coordinator's directory."""

AUDIT_NAME = "audit"
"""The audit log, in the coordinator's directory."""

CHECKPOINT_MANIFEST = "manifest.json"
"""In every complete checkpoint: its files with their sizes and SHA-256."""

EXPORT = "export"
"""The final export, in the run's directory."""
EXPORTS = "exports"
"""The exports that were asked for by name, in the run's directory."""

EXPORT_MANIFEST = "paceline_manifest.json"
"""In every export: its files with their sizes and SHA-256."""

STATEMENT = "paceline.json"
"""In every registered folder: the statement."""
SIGNATURE = "model.sig"
"""In every registered folder: the signature over all other files."""
CARD = "README.md"
"""In every registered folder: the model card; it replaces the card of the export, if that has one."""
SPEC = "paceline_spec.yaml"
"""In a registered folder: the resolved spec of its run."""
EVALUATIONS, VERDICTS = "evaluations", "verdicts"
"""In a registered folder: results of `paceline eval` and verdicts of `paceline gate`."""
