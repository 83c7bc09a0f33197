"""Every error a user can meet; the tree is the documentation.

Empo2Error
├── ConfigError       a key, a value or a combination of values that cannot work
├── DataError         a weights file, tokenizer, catalogue or recorded run that cannot be read
├── EnvError          the environment failed: no Java, a dead simulator, an unknown task
├── EngineError       the rollout engine failed or refused a request
├── SyncError         published weights that are missing, damaged, of another model, or cannot be written
├── UpdateError       the training diverged: no update has a finite loss and gradient any more
├── GangError         a process of the run did not come, failed or is gone
└── CheckpointError   a checkpoint is missing, corrupt or belongs to another run

The message says what, where, and what is allowed. `empo2` prints it on one line and exits with 2.
"""


class Empo2Error(Exception):
    """Base of all errors that are a user's or the world's fault, never a bug in this package."""


class ConfigError(Empo2Error):
    """A configuration that cannot work."""


class DataError(Empo2Error):
    """A file that cannot be read as what it should be."""


class EnvError(Empo2Error):
    """The environment failed."""


class EngineError(Empo2Error):
    """The rollout engine failed."""


class SyncError(Empo2Error):
    """Weights that cannot be published or must not be loaded."""


class UpdateError(Empo2Error):
    """The optimizer has nothing finite to apply."""


class CheckpointError(Empo2Error):
    """A checkpoint cannot be written or restored."""


class GangError(Empo2Error):
    """Another process of the run is missing or failed."""
