"""`RunSpec`: everything that defines one training job, validated before anything starts. An unknown key is an error
that suggests the intended key, and contradictory settings are refused with both values. Names follow NeMo RL if it has
a key for the same thing. Defaults live only here. `paceline.spec.reading` reads YAML and dotted overrides."""

from paceline.spec.run import RunSpec
from paceline.spec.sections.algorithms import (
    AdvantageName,
    AsyncGrpoSection,
    DistillationSection,
    DpoSection,
    ExamplesSection,
    GrpoSection,
    KtoSection,
    OrpoSection,
    RmSection,
    SftSection,
)
from paceline.spec.sections.base import Section
from paceline.spec.sections.data import DataSection
from paceline.spec.sections.loss import LossSection
from paceline.spec.sections.policy import (
    GenerationSection,
    LoraSection,
    OptimizerSection,
    ParallelSection,
    PolicySection,
    SchedulerSection,
    ValueSection,
)
from paceline.spec.sections.system import CheckpointingSection, ClusterSection, LoggerSection, WeightsSection
from paceline.spec.sections.user_code import BundleSection, RewardFunctionSection

__all__ = [
    "AdvantageName", "AsyncGrpoSection", "BundleSection", "CheckpointingSection", "ClusterSection",
    "DataSection", "DistillationSection", "DpoSection", "ExamplesSection", "GenerationSection", "GrpoSection",
    "KtoSection", "LoggerSection", "LoraSection", "LossSection", "OptimizerSection", "OrpoSection",
    "ParallelSection", "PolicySection", "RewardFunctionSection", "RmSection", "RunSpec", "SchedulerSection",
    "Section", "SftSection", "ValueSection", "WeightsSection",
]  # fmt: skip
