"""Checkpoints of the learner: model, optimizer, generators and position, written by all ranks together.

A checkpoint is the folder `<session>-<step>`. Its `manifest.json` is written last, as one object, with size and SHA-256
of every other file; a folder without it is torn, and no reader accepts it. Each rank lists the files that it wrote, and
rank 0 checks that it sees all of them: on several hosts one path may name different folders, and a manifest of one
folder would call half a checkpoint complete.

Promise: `load` accepts only the bytes that `save` wrote, and training continues from them as if it had never stopped
(bit for bit on CPUs at the same world size and thread count; the manifest has both). With a storage key every file
except the manifest is encrypted. Sizes and hashes are those of the encrypted bytes, so they can be compared without the
key. The manifest, which is not encrypted, has names, sizes, hashes and the position.

Security: the state is in the format of torch.distributed.checkpoint, whose `.metadata` is a pickle. `load` compares
every file with the manifest, and the manifest with a given hash, before it opens a file. Pass only a hash from the
ledger, because a hash computed from the folder itself proves nothing. The decoded bytes may name only classes of
checkpoint metadata (`learner/checkpoints/metadata.py`).
"""

from __future__ import annotations

import json
import re
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load as load_collectively
from torch.distributed.checkpoint.state_dict_saver import save as save_collectively

from paceline.encryption.storage_key import storage_key
from paceline.errors import Conflict, InvalidInput, PacelineError, Unavailable
from paceline.files.names import CHECKPOINT_MANIFEST
from paceline.files.storage import Folder
from paceline.learner.checkpoints.manifest import CheckpointFile, CheckpointManifest, hash_files, write_manifest
from paceline.learner.checkpoints.metadata import (
    METADATA,
    StatePlanner,
    decode_metadata,
    files_of,
    restrict_rank_objects,
)
from paceline.learner.checkpoints.state_files import state_reader, state_writer
from paceline.learner.checkpoints.verification import Location, Verified, verify
from paceline.learner.collectives import gather_bytes, world_size
from paceline.learner.model.adapter import has_adapter, is_part_of_adapter
from paceline.learner.step.critic import Critic

restrict_rank_objects()  # before the ranks exchange any object

NAME = re.compile(r"(\d+)-(\d+)")


class Misfit(Conflict):
    """The checkpoint is complete, but belongs to another model or optimizer."""


class Checkpoint(NamedTuple):
    """A complete checkpoint: its folder and its manifest, without the state."""

    path: Folder
    manifest_sha256: str
    """SHA-256 of the manifest: the ledger registers it, and `load` requires it."""
    manifest: CheckpointManifest


def save(
    directory: Location,
    *,
    session: int,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    critic: Critic | None = None,
    reference: nn.Module | None = None,
    chain_hash: str = "",
) -> Checkpoint | None:
    """Write the state after `step` steps to `directory/<session>-<step>`. A collective call of all ranks. `chain_hash`
    is the position in the ledger's hash chain. The learning rate is a function of the step, so there is no scheduler
    state. Return the checkpoint on rank 0, once all files are on disk, and None on the other ranks. Raises Conflict if
    a complete checkpoint of this step exists, Unavailable if writing failed (a full disk); the folder is then torn."""
    folder = prepare(directory, session, step)
    return write(
        whole_state(model, optimizer, critic, reference), folder, session=session, step=step, chain_hash=chain_hash
    )


def prepare(directory: Location, session: int, step: int) -> Folder:
    """Return a new checkpoint's folder, emptied by rank 0. Raises Conflict if the folder has a complete checkpoint."""
    folder = Folder(directory) / f"{session}-{step}"
    if _rank() == 0:
        if folder.exists(CHECKPOINT_MANIFEST):
            raise Conflict(f"checkpoint {folder} exists and is complete, so it is not written again")
        folder.remove()  # a torn one of this session, which no other process uses
        folder.make()  # another rank's writer may create it meanwhile
    return folder


def whole_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, critic: Critic | None = None, reference: nn.Module | None = None
) -> dict[str, Any]:
    """Return this rank's part of a checkpoint. The tensors are live: later steps change them."""
    return _whole_state(model, optimizer, critic, reference) | {"rng": {str(_rank()): _generators(model)}}


def write(
    state: dict[str, Any],
    folder: Folder,
    *,
    session: int,
    step: int,
    chain_hash: str = "",
    group: dist.ProcessGroup | None = None,
    num_threads: int | None = None,
    shared: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> Checkpoint | None:
    """Write `whole_state` into the folder that `prepare` made. A collective call over `group` (None: the default one).
    If `shared` is false, each rank has a separate folder, and the caller must bring the files of all ranks together.
    `num_threads` is the number of threads that computed the state (None: those of the calling thread); `extra` is for
    the manifest. Return the checkpoint on rank 0 and None on other ranks. Raises Unavailable."""
    with as_error(Unavailable, f"checkpoint {folder} could not be written"):
        save_collectively(
            state,
            storage_writer=state_writer(folder, storage_key()),
            process_group=group,
            no_dist=not dist.is_initialized(),
        )
    files = files_of_all_ranks(folder, _rank(), group, shared=shared)
    if _rank() != 0:
        return None
    manifest = CheckpointManifest(
        session=session,
        step=step,
        chain_hash=chain_hash,
        world_size=world_size(),
        num_threads=num_threads or torch.get_num_threads(),
        torch_version=str(torch.__version__),
        extra=dict(extra or {}),
        files=files,
    )
    return Checkpoint(folder, write_manifest(folder, manifest), manifest)


def load(
    path: Location,
    *,
    expected_sha256: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    critic: Critic | None = None,
    reference: nn.Module | None = None,
) -> CheckpointManifest:
    """Load a checkpoint into `model`, `optimizer`, `critic` and `reference`; return its manifest. A collective call.
    The checkpoint may have been written with another world size and sharding. torch's generators are restored if the
    world size is equal, and stay unchanged otherwise. Raises NotFound if there is no such folder or no manifest in it,
    Conflict if the manifest is not the expected one or a file differs from the manifest, Unavailable if the disk or
    store cannot be read now, WrongKey if the checkpoint is encrypted with another storage key. All ranks raise the same
    error, before anything is unpickled. Raises Misfit if the checkpoint is complete, but of another model."""
    rank, ranks = _rank(), world_size()
    verified = verify(path, expected_sha256, rank, ranks, next(model.parameters()).device)
    manifest = verified.manifest
    state = _whole_state(model, optimizer, critic, reference)
    if ranks == manifest.world_size:
        state["rng"] = {str(rank): _generators(model)}
    read_state(verified, state)
    set_model_state_dict(model, state["model"], options=StateDictOptions(strict=not has_adapter(model)))
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    if critic is not None:
        set_model_state_dict(critic.model, state["value_model"])
        set_optimizer_state_dict(critic.model, critic.optimizer, state["value_optimizer"])
    if reference is not None:
        set_model_state_dict(reference, state["reference"])
    if ranks == manifest.world_size:
        _restore_generators(model, state["rng"][str(rank)])
    return manifest


def list_positions(directory: Location) -> list[tuple[tuple[int, int], Folder]]:
    """Return (session, step) and folder of every complete checkpoint, oldest first."""
    return [(_position(f), f) for f in _folders(directory) if f.exists(CHECKPOINT_MANIFEST)]


def prune(directory: Location, keep: Collection[str], spared: Collection[str] = ()) -> list[str]:
    """Delete all checkpoints, complete or torn, that are older than the newest one in `keep`, except those in `keep`
    and `spared`; newer ones may be in progress. Return the folders of the deleted checkpoints, as texts."""
    folders = _folders(directory)
    newest = max((_position(folder) for folder in folders if str(folder) in keep), default=None)
    deleted = []
    for folder in folders:
        if newest is None or _position(folder) >= newest or str(folder) in keep or str(folder) in spared:
            continue
        # The manifest goes first, so that an interruption leaves a torn checkpoint and not a false one.
        folder.delete(CHECKPOINT_MANIFEST)
        folder.remove()
        deleted.append(str(folder))
    return deleted


def _state(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    weights = get_model_state_dict(model)
    if has_adapter(model):  # the base is not saved, because it does not change
        weights = {name: tensor for name, tensor in weights.items() if is_part_of_adapter(name)}
    state: dict[str, Any] = {"model": weights}
    if optimizer is not None:
        fresh = not optimizer.state
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
        if fresh:
            # torch fills a fresh optimizer's state by a step with zero gradients at rate 0, which counts as a step in
            # the bias correction; a checkpoint must not count as a step.
            for moments in optimizer.state.values():
                moments["step"].zero_()
            state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state


def _whole_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, critic: Critic | None, reference: nn.Module | None
) -> dict[str, Any]:
    state = _state(model, optimizer)
    if critic is not None:
        state |= {f"value_{name}": part for name, part in _state(critic.model, critic.optimizer).items()}
    return state if reference is None else state | {"reference": get_model_state_dict(reference)}


def read_state(verified: Verified, state: dict[str, Any]) -> None:
    """Fill the tensors of `state` from a verified checkpoint. A collective call of all ranks. Raises Misfit if the
    checkpoint lacks an entry of `state`, Unavailable if its files cannot be read now."""
    with as_error(
        Misfit,
        f"checkpoint {verified.folder} refused: it does not fit the model (restore the model from which the run began)",
    ):
        load_collectively(
            state,
            storage_reader=state_reader(verified.folder, verified.metadata),
            planner=StatePlanner(),
            no_dist=not dist.is_initialized(),
        )


@contextmanager
def as_error(kind: type[PacelineError], what: str) -> Iterator[None]:
    """Raise a failure that torch reports as an error of type `kind`: the class of torch's report is no subclass of
    Exception, so no handler would catch it. Also suppress torch's warning about a missing process group, whose absence
    is intended."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            yield
        except CheckpointException as error:
            for failure in error.failures.values():
                if isinstance(failure[0], InvalidInput):
                    raise failure[0] from error
            reasons = {f"rank {rank}: {failure[0]}" for rank, failure in error.failures.items()}
            if any(isinstance(failure[0], OSError) for failure in error.failures.values()):
                kind = Unavailable
            raise kind(f"{what}: {'; '.join(sorted(reasons))}") from error


def _generators(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state of this rank's torch generators: the CPU's and, if the model is on a GPU, that GPU's."""
    device = next(model.parameters()).device
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore_generators(model: nn.Module, states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], next(model.parameters()).device)


def _folders(directory: Location) -> list[Folder]:
    """Return the folders of checkpoints, complete or torn, oldest (session, step) first."""
    return sorted((f for f in Folder(directory).folders() if NAME.fullmatch(f.name)), key=_position)


def _position(folder: Folder) -> tuple[int, int]:
    session, step = folder.name.split("-")
    return int(session), int(step)


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


LATE_PAUSES_S = (0.5, 1.0, 2.0)
"""Pauses in seconds before new checks for a missing file of another rank; network file systems may show a file late."""


def files_of_all_ranks(
    folder: Folder, rank: int, group: dist.ProcessGroup | None, *, shared: bool = True
) -> tuple[CheckpointFile, ...]:
    """Return every rank's files as that rank wrote them. A collective call; only rank 0 gets the result and the errors.
    Raises Unavailable if a rank could not read its files, if the metadata name other files, or if `shared` is true
    and rank 0 does not see all files."""
    listings = [json.loads(part) for part in gather_bytes(_listing(folder, rank).encode(), group)]
    if rank != 0:
        return ()
    for number, part in enumerate(listings):
        if isinstance(part, str):
            raise Unavailable(f"checkpoint {folder}: rank {number} cannot read the files that it wrote: {part}")
    files = [CheckpointFile.model_validate(file) for part in listings for file in part]
    listed = {file.path: file.size_bytes for file in files}
    _check_metadata(folder, set(listed))
    if not shared:
        return tuple(sorted(files, key=lambda file: file.path))
    present = folder.files()
    for pause_s in LATE_PAUSES_S:
        if present == listed:
            break
        time.sleep(pause_s)
        present = folder.files()
    if missing := sorted(name for name in listed if present.get(name) != listed[name]):
        raise Unavailable(
            f"checkpoint {folder}: rank 0 does not see {missing[0]!r} as another rank wrote it; checkpoint_dir must be "
            "one folder that all ranks share"
        )
    if foreign := sorted(present.keys() - listed.keys()):
        raise Unavailable(f"checkpoint {folder}: {foreign[0]!r} is in the folder, but no rank wrote it")
    return tuple(sorted(files, key=lambda file: file.path))


def _listing(folder: Folder, rank: int) -> str:
    """Return this rank's files as JSON: a list, or a text with the error if they cannot be read."""
    try:
        names = [n for n in folder.files() if n.startswith(f"__{rank}_") or (rank == 0 and n == METADATA)]
        return json.dumps([file.model_dump() for file in hash_files(folder, names)])
    except Exception as error:  # the clients of object stores raise errors without a common base
        return json.dumps(f"{type(error).__name__}: {error}")


def _check_metadata(folder: Folder, listed: set[str]) -> None:
    try:
        named = files_of(decode_metadata(folder.read(METADATA), listed))
    except (Conflict, OSError) as error:
        raise Unavailable(f"checkpoint {folder}: {METADATA} does not agree with the written files: {error}") from error
    if unnamed := sorted(listed - named - {METADATA}):
        raise Unavailable(f"checkpoint {folder}: {unnamed[0]!r} was written, but {METADATA} does not name it")
