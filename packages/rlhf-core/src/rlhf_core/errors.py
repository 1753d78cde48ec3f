"""The error tree. A message says what was wrong, what was found, and what to do instead.

RLHFError
├── UserError                    the input is at fault; commands print the message without a traceback
│   ├── ConfigError              a configuration key or value
│   ├── DataError                a file or a row of data
│   ├── CheckpointError          a checkpoint or a model's file that is damaged, or belongs to something else
│   ├── PluginError              a named backend, engine or function that cannot be found or used
│   ├── CapabilityError          a backend is asked for something it says it cannot do
│   └── ResourceError            the machine or the cluster is too small for the request
├── DeadlineExceeded             a wait ended; names what was awaited
├── WeightSyncError              moving weights failed; the receiver is stale until it is synced again
│   └── StaleWeightsError        a generator was asked for samples while its weights cannot be trusted
├── EngineDiedError              a generator or a training rank is gone
├── RewardError                  a reward function raised, hung or returned something unusable
├── SandboxError                 a sandbox could not run a program, for no fault of the program
├── RunStopped                   a run was asked to end, and did so in good order
└── TrainingDivergedError        too many non-finite steps in a row
"""

from __future__ import annotations


class RLHFError(Exception):
    """Root of all errors raised on purpose by the rlhf packages."""


class UserError(RLHFError):
    """Input that a person can correct; commands print it without a traceback."""


class ConfigError(UserError):
    """A configuration key or value is wrong."""


class DataError(UserError):
    """A data file, column or row is wrong."""


class CheckpointError(UserError):
    """A checkpoint or a model's file is missing, damaged, or of another model or engine."""


class PluginError(UserError):
    """A backend, engine, reward or loss given by name cannot be found or has the wrong signature."""


class CapabilityError(UserError):
    """A backend is asked for something that its capabilities exclude."""


class ResourceError(UserError):
    """More workers, accelerators or memory are asked for than there are."""


class DeadlineExceeded(RLHFError):
    """A wait reached its deadline. The message names what was awaited and for how long."""


class WeightSyncError(RLHFError):
    """A weight transfer failed. The receiving engine holds undefined weights until the next full sync."""


class StaleWeightsError(WeightSyncError):
    """A generator refuses to sample because its last weight transfer did not complete."""


class EngineDiedError(RLHFError):
    """A rollout engine or training rank is gone; the message carries the first cause."""


class RewardError(RLHFError):
    """A reward function raised, exceeded its deadline, or returned the wrong number or kind of scores."""

    def __init__(self, message: str, *, sample_ids: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.sample_ids = sample_ids
        """The samples at fault where they are known, else empty."""


class SandboxError(RLHFError):
    """A sandbox failed: the program in it is not at fault, and may be run again."""


class RunStopped(RLHFError):
    """A run ended before its last step because it was asked to; its newest state is in a checkpoint."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        """Of the command: 128 and the signal's number, if a signal asked."""


class TrainingDivergedError(RLHFError):
    """More consecutive steps than allowed had a non-finite loss or gradient."""
