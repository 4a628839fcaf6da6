"""Deletes the storage of snapshots, one or many at a time, and the remains of one that was never proved."""

from __future__ import annotations

from contextlib import contextmanager, suppress
from itertools import groupby
from typing import TYPE_CHECKING, Literal

from snapmgr.contract.abilities import BatchDeleting
from snapmgr.contract.errors import InUseError, NoRoomError, SnapmgrError
from snapmgr.system.probe import require_pools_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from snapmgr.catalog.manifest import Manifest
    from snapmgr.context import Context
    from snapmgr.contract.backend import Backend
    from snapmgr.contract.records import Pool, SnapshotRef

# So many snapshots are DELETING at a time, if we are killed then.
_BATCH = 128


def delete(ctx: Context, manifest: Manifest, *, pinned: bool = False) -> None:
    """Delete a snapshot's storage and then its manifest; a pinned snapshot only with `pinned`.

    Raises InUseError while somebody uses it, or if it is pinned. After a failure in the middle it stays DELETING.
    """
    for _, error in delete_all(ctx, (manifest,), pinned=pinned):
        if error is not None:
            raise error


def delete_all(
    ctx: Context,
    manifests: Iterable[Manifest],
    *,
    pinned: bool = False,
    refuse: Callable[[Manifest], None] = lambda _manifest: None,
    doing: str = "deleting",
) -> Iterator[tuple[Manifest, SnapmgrError | None]]:
    """Delete snapshots as `delete` does each, and yield each with its error; one that fails does not stop the others.

    A storage that can deletes many at a time: they are marked DELETING with one flush, deleted with one commit, and
    only then forgotten. No lock is held when one is yielded.

    Args:
        ctx: the environment.
        manifests: the snapshots, in the order of their deletion.
        pinned: also the pinned ones.
        refuse: raises a SnapmgrError for one that must not be deleted.
        doing: names the work for its progress.
    """
    manifests = tuple(manifests)
    done = 0
    for backend, group in groupby(manifests, key=lambda one: one.backend):
        several, size = tuple(group), _batch_size(ctx, backend)
        for start in range(0, len(several), size):
            batch = several[start : start + size]
            if len(manifests) > 1:
                ctx.progress(doing, done, len(manifests))
            errors = _delete_batch(ctx, batch, pinned=pinned, refuse=refuse)
            yield from ((one, errors.get(one.id)) for one in batch)
            done += len(batch)


def _batch_size(ctx: Context, backend: str) -> int:
    with suppress(SnapmgrError):  # then each deletion says it
        if isinstance(ctx.unchecked_backend(backend), BatchDeleting):
            return _BATCH
    return 1


def _delete_batch(
    ctx: Context, batch: Sequence[Manifest], *, pinned: bool, refuse: Callable[[Manifest], None]
) -> dict[str, SnapmgrError]:
    """Delete snapshots of one backend; return the errors of those that were not deleted, by id."""
    errors: dict[str, SnapmgrError] = {}
    try:
        backend = ctx.backend(batch[0].backend)
        for one in batch:
            with _noted(errors, one):
                refuse(one)
    except SnapmgrError as error:
        return dict.fromkeys((one.id for one in batch), error)
    with ctx.catalog.deleting_many(one.id for one in batch if one.id not in errors) as unlocked:
        errors |= unlocked
        found: list[Manifest] = []
        for one in batch:
            if one.id not in errors:
                with _noted(errors, one):
                    found.append(_load_deletable(ctx, one.id, pinned=pinned))
        _refuse_hanging(ctx, found, errors)
        found = [one for one in found if one.id not in errors]
        _mark_deleting(ctx, found, errors)
        _delete_members(ctx, backend, found, errors)
        ctx.readings.clear()
        ctx.catalog.forget(*(one.id for one in found if one.id not in errors))
    return errors


@contextmanager
def _noted(errors: dict[str, SnapmgrError], manifest: Manifest) -> Iterator[None]:
    try:
        yield
    except SnapmgrError as error:
        errors[manifest.id] = error


def _load_deletable(ctx: Context, snapshot_id: str, *, pinned: bool) -> Manifest:
    # Pinning takes the lock that we hold, too: somebody may have pinned it since the deletion was planned.
    manifest = ctx.catalog.load(snapshot_id).manifest
    if manifest.pinned and manifest.state == "ready" and not pinned:
        raise InUseError(f"snapshot {manifest.id} is pinned", hint=f"snapmgr unpin {manifest.short_id}")
    return manifest


def _refuse_hanging(ctx: Context, manifests: Iterable[Manifest], errors: dict[str, SnapmgrError]) -> None:
    """Note an error for each snapshot whose storage hangs; each storage is asked once."""
    answers: dict[tuple[Pool, ...], SnapmgrError | None] = {}
    for one in manifests:
        pools = _pools_of(one)
        if pools not in answers:
            answers[pools] = None
            try:
                require_storage_answers(ctx, one)
            except SnapmgrError as error:
                answers[pools] = error
        failure = answers[pools]
        if failure is not None:
            errors[one.id] = failure


def _mark_deleting(ctx: Context, manifests: Iterable[Manifest], errors: dict[str, SnapmgrError]) -> None:
    deleting = [one.with_state("deleting", reason=one.reason) for one in manifests]
    for snapshot_id, error in ctx.catalog.write_many(deleting).items():
        if isinstance(error, NoRoomError):
            # Deleting frees the space. If we are killed now, it is READY without storage: doctor and prune notice.
            ctx.tell(f"{snapshot_id}: deleting it although its state cannot be written: {error.message}")
        else:
            errors[snapshot_id] = error


def _delete_members(
    ctx: Context, backend: Backend, manifests: Sequence[Manifest], errors: dict[str, SnapmgrError]
) -> None:
    """Delete the members of snapshots: first those of all, and so on, as one that is in use keeps its others."""
    for number in range(max((len(one.members) for one in manifests), default=0)):
        turn = [one for one in manifests if one.id not in errors and number < len(one.members)]
        failures = _delete_refs(backend, [one.members[number].ref for one in turn])
        for one, failure in zip(turn, failures, strict=True):
            if failure is None:
                continue
            errors[one.id] = failure
            # In use, and nothing is deleted yet: it is as good as before. Otherwise there may be space by now.
            untouched = number == 0 and isinstance(failure, InUseError)
            with _noted(errors, one), suppress(NoRoomError):
                ctx.catalog.write(one if untouched else one.with_state("deleting", reason=one.reason))


def _delete_refs(
    backend: Backend, refs: Sequence[SnapshotRef], wait: Literal["name", "space"] = "name"
) -> Sequence[SnapmgrError | None]:
    try:
        if isinstance(backend, BatchDeleting):
            return backend.delete_batch(tuple(refs), wait=wait)
    except SnapmgrError as error:
        return [error] * len(refs)
    errors: list[SnapmgrError | None] = []
    for ref in refs:
        try:
            backend.delete(ref, wait=wait)
            errors.append(None)
        except SnapmgrError as error:
            errors.append(error)
    return errors


def await_space(ctx: Context, manifests: Iterable[Manifest]) -> dict[str, SnapmgrError]:
    """Wait until the space of deleted snapshots is free.

    Return the storage's errors, also those at its time limit, by the ids of the snapshots.
    """
    errors: dict[str, SnapmgrError] = {}
    refs: dict[str, list[SnapshotRef]] = {}
    for member in (member for one in manifests for member in one.members):
        refs.setdefault(member.ref.backend, []).append(member.ref)
    for name, ours in refs.items():
        try:
            # Deleting them again is not an error; this call only waits until their space is free.
            failures = _delete_refs(ctx.backend(name), ours, "space")
        except SnapmgrError as error:
            failures = [error] * len(ours)
        errors |= {ref.snapshot_id: error for ref, error in zip(ours, failures, strict=True) if error is not None}
    ctx.readings.clear()
    return errors


def remove_traces(ctx: Context, manifest: Manifest) -> None:
    """Remove everything that the storage's own inventory lists for a snapshot without proof."""
    if not manifest.intents:
        return
    require_storage_answers(ctx, manifest)
    backend = ctx.backend(manifest.backend)
    for found in backend.inventory(intended_pools(manifest), notes=False):
        if found.snapshot_id != manifest.id:
            continue
        if found.ref is not None and found.kind == "snapshot":
            backend.delete(found.ref)
        elif found.kind == "debris":
            backend.repair(found)


def require_storage_answers(ctx: Context, manifest: Manifest) -> None:
    """Raise StorageError if the storage of a snapshot hangs."""
    require_pools_answer(_pools_of(manifest), ctx.mounter.mounts())


def _pools_of(manifest: Manifest) -> tuple[Pool, ...]:
    return tuple(dict.fromkeys((*intended_pools(manifest), *(member.ref.pool for member in manifest.members))))


def intended_pools(manifest: Manifest) -> tuple[Pool, ...]:
    """Return the pools in which a backup had announced that it would create something."""
    return tuple(dict.fromkeys(intent.pool for intent in manifest.intents))
