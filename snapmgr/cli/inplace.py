"""``snapmgr restore --in-place``: prints the consequences, asks for confirmation, and reports the result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from snapmgr.catalog.inplace import refuse_inplace_target
from snapmgr.cli.choice import choose
from snapmgr.cli.documents import fields, iso, show_time
from snapmgr.cli.output import ask_for_word, end_document, print_lines
from snapmgr.contract.errors import EXIT_OK, gravest
from snapmgr.contract.units import format_size
from snapmgr.restore.inplace.plan import plan_inplace
from snapmgr.restore.inplace.run import restore_inplace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapmgr.cli.session import Session
    from snapmgr.restore.inplace.plan import InplacePlan, OriginPlan
    from snapmgr.restore.inplace.run import InplaceResult

_NAMES_SHOWN = 12


def restore_in_place(session: Session, name: str, *, force: bool, yes: bool, unverified: bool, dry_run: bool) -> int:
    """Restore the origins of a snapshot in place, or print what that would mean; return the exit code."""
    from snapmgr.restore.inplace.run import resume_inplace

    ctx = session.context()
    entry = choose(session, ctx, name, unverified=unverified, dry_run=dry_run)
    if dry_run:
        refuse_inplace_target(ctx.catalog, entry.manifest.id)
    else:
        done = resume_inplace(ctx, entry.manifest.id)
        if done is not None:
            return _finish(session, done, entry.manifest.source)
        # Taking up an interrupted restore may have undone it, which changes the catalog.
        entry = ctx.catalog.load(entry.manifest.id)
    plan = plan_inplace(ctx, entry, force=force)
    lines = list(_say(plan))
    if dry_run:
        return _show(session, plan, lines)
    if plan.obstacles:
        for obstacle in plan.obstacles[1:]:
            session.console.fail(obstacle)
        raise plan.obstacles[0]
    for line in lines:
        session.console.warn(line)
    if not yes:
        why = "an in-place restore needs confirmation"
        ask_for_word(plan.entry.manifest.short_id, to="continue", why=why, nothing="changed")
    return _finish(session, restore_inplace(ctx, plan, force=force), entry.manifest.source)


def _say(plan: InplacePlan) -> Iterator[str]:
    manifest = plan.entry.manifest
    for origin in plan.origins:
        yield (
            f"{origin.storage.origin} goes back to {show_time(manifest.taken_at)} ({manifest.id}): everything "
            "written to it since then is lost"
        )
        yield _beside(origin)
        if origin.mounts:
            points = ", ".join(mount.point for mount in origin.mounts)
            yield f"it is unmounted, and mounted again afterwards: {points}"
        else:
            yield f"{origin.storage.origin} is not mounted now, and will not be mounted afterwards"
        if origin.storage.write_bytes:
            yield f"up to {format_size(origin.storage.write_bytes)} will be written to it"
        yield from origin.storage.remarks
        for reason in origin.storage.loses:
            yield f"{reason.what} ({reason.hint})"
    if plan.consumes:
        yield f"the restore consumes the snapshot {manifest.id}: it does not exist afterwards"
        if plan.rules:
            why = f" ({manifest.pin_reason})" if manifest.pin_reason else ""
            yield f"that snapshot is protected: {', '.join(plan.rules)}{why}"
    others = [job for job in plan.jobs if job != manifest.job]
    if others:
        yield f"other jobs have snapshots of the same volume: {', '.join(others)}"


def _beside(origin: OriginPlan) -> str:
    if origin.beside is None:
        return "the whole volume goes back, with everything else on it, which cannot be listed from here"
    if not origin.beside:
        return "the whole volume goes back; nothing else is on it"
    names = origin.beside[:_NAMES_SHOWN]
    more = len(origin.beside) - len(names)
    return f"the whole volume goes back, with everything else on it: {', '.join(names)}" + (
        f"; and {more} more" if more > 0 else ""
    )


def _show(session: Session, plan: InplacePlan, lines: list[str]) -> int:
    for obstacle in plan.obstacles:
        session.console.fail(obstacle)
    code = gravest([obstacle.exit_code for obstacle in plan.obstacles])
    if session.json:
        _document(session, code, plan=plan, done=None)
    else:
        print_lines(["would restore in place:", *(f"  {line}" for line in lines)])
    return code


def _finish(session: Session, done: InplaceResult, source: str) -> int:
    if session.json:
        _document(session, EXIT_OK, plan=None, done=done)
        return EXIT_OK
    what = "was consumed" if done.consumed else "still exists"
    print_lines(
        [
            f"restored {', '.join(done.origins)} to {done.snapshot_id} at {show_time(done.merged_at)}; "
            f"the snapshot {what}",
            *(f"  mounted at {point}" for point in done.mounted),
        ]
    )
    if source == "mysql":
        session.console.tell("next: start the server")
    if done.consumed:
        session.console.tell("next: take another backup, as that snapshot no longer exists")
    return EXIT_OK


def _document(session: Session, code: int, *, plan: InplacePlan | None, done: InplaceResult | None) -> None:
    session.document(
        code,
        dry_run=plan is not None,
        in_place=True,
        snapshot_id=plan.entry.manifest.id if plan is not None else done.snapshot_id if done is not None else None,
        plan=_plan_document(plan) if plan is not None else None,
        restored=_done_document(done) if done is not None else None,
    )


def _done_document(done: InplaceResult) -> dict[str, Any]:
    return fields(done, "origins", "mounted", "consumed") | {"merged_at": iso(done.merged_at)}


def _plan_document(plan: InplacePlan) -> dict[str, Any]:
    return {
        **fields(plan, "consumes", "rules", "jobs"),
        "obstacles": [end_document(error) for error in plan.obstacles],
        "origins": [
            {
                **fields(origin.storage, "origin", "device"),
                "mounted": [mount.point for mount in origin.mounts],
                "beside": list(origin.beside) if origin.beside is not None else None,
                "write_bytes": origin.storage.write_bytes,
                "loses": [reason.what for reason in origin.storage.loses],
                "remarks": list(origin.storage.remarks),
            }
            for origin in plan.origins
        ],
    }
