"""Everything that a storage plugin may import: the backend's protocols, their records, errors and units.

Only plugins and the contract suite import this package; the rest of snapmgr imports `snapmgr.contract` itself.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from snapmgr.contract.abilities import (
    AlterationCheck,
    AutoExtending,
    BatchDeleting,
    Benchmarked,
    CapacityReporting,
    ClientMount,
    FolderCloning,
    Provisioner,
    Remounting,
    Revertible,
    ScratchAttaching,
    SpaceSharing,
)
from snapmgr.contract.backend import (
    API_VERSION,
    Announcing,
    Armed,
    Backend,
    Held,
    Mounter,
    PrivateMount,
    Readying,
    Runner,
)
from snapmgr.contract.errors import (
    AlteredError,
    BusyError,
    CommandError,
    ConfigError,
    InUseError,
    MissingRequirementError,
    NotFoundError,
    SnapmgrError,
    StorageError,
)
from snapmgr.contract.records import (
    Attachment,
    AttachRecord,
    BenchStorage,
    BlockDevice,
    Capabilities,
    ClientOptions,
    Completed,
    FireError,
    Found,
    Gauge,
    Intent,
    Mount,
    NotMine,
    Pool,
    Provisioned,
    ProvisionOrder,
    Reason,
    Reservoir,
    RevertPlan,
    Shot,
    SnapshotRef,
    Target,
    Usage,
    Volume,
)
from snapmgr.contract.units import format_duration, format_size, parse_duration, parse_size
from snapmgr.system.environment import install_command
from snapmgr.system.loopdevice import attach_loop

if TYPE_CHECKING:
    from snapmgr.system.provisioning import StorageMaker, provisioned, unmake

__all__ = [
    "API_VERSION",
    "AlterationCheck",
    "AlteredError",
    "Announcing",
    "Armed",
    "AttachRecord",
    "Attachment",
    "AutoExtending",
    "Backend",
    "BatchDeleting",
    "BenchStorage",
    "Benchmarked",
    "BlockDevice",
    "BusyError",
    "Capabilities",
    "CapacityReporting",
    "ClientMount",
    "ClientOptions",
    "CommandError",
    "Completed",
    "ConfigError",
    "FireError",
    "FolderCloning",
    "Found",
    "Gauge",
    "Held",
    "InUseError",
    "Intent",
    "MissingRequirementError",
    "Mount",
    "Mounter",
    "NotFoundError",
    "NotMine",
    "Pool",
    "PrivateMount",
    "ProvisionOrder",
    "Provisioned",
    "Provisioner",
    "Readying",
    "Reason",
    "Remounting",
    "Reservoir",
    "RevertPlan",
    "Revertible",
    "Runner",
    "ScratchAttaching",
    "Shot",
    "SnapmgrError",
    "SnapshotRef",
    "SpaceSharing",
    "StorageError",
    "StorageMaker",
    "Target",
    "Usage",
    "Volume",
    "attach_loop",
    "format_duration",
    "format_size",
    "install_command",
    "parse_duration",
    "parse_size",
    "provisioned",
    "unmake",
]

# What makes storage, for tests and the benchmark: a backup does not load it.
_MAKING = frozenset({"StorageMaker", "provisioned", "unmake"})


def __getattr__(name: str) -> object:
    if name not in _MAKING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("snapmgr.system.provisioning"), name)
