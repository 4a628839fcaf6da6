"""Describes the machine of a sample in words (see `snapmgr.bench.device.hostfacts`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from snapmgr.bench.measure.memory import nominal_bytes
from snapmgr.contract.units import format_size

# The mark may fail at the first mount: then it is a fact of all samples but the first.
_NOT_SPEED = frozenset({"allocated_bytes", "marked"})

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Host = Mapping[str, Any]


def is_loop(host: Host) -> bool:
    """Return whether the target was a file: the measurement then includes that file's file system."""
    return any(device.get("kind") == "loop" for device in devices(host))


def is_rotational(host: Host) -> bool | None:
    """Return whether the lowest device is a spinning disk; None if unknown."""
    known = [device["rotational"] for device in devices(host) if device.get("rotational") is not None]
    return bool(known[-1]) if known else None


def is_virtual(host: Host) -> bool:
    """Return whether this kernel is known to run on a hypervisor."""
    virtual = host.get("virtualisation")
    vm = virtual.get("vm") if isinstance(virtual, dict) else virtual
    return vm not in {None, "", "none"}


def is_guest(host: Host) -> bool:
    """Return whether its disk is known to be a host's file: only its ratios of operations and byte counts are valid."""
    virtual = host.get("virtualisation")
    vm = virtual.get("vm") if isinstance(virtual, dict) else virtual
    return vm == "uml"


def devices(host: Host) -> list[Mapping[str, Any]]:
    """Return the device and all devices below it, top down, including those of a loop device's file system."""
    return list(_below(host.get("device") or {}))


def _below(device: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if not device:
        return
    yield device
    for lower in (*device.get("below", ()), *(device.get("loop") or {}).get("on", ())):
        yield from _below(lower)


def device_words(host: Host) -> str:
    """Return "Example SSD 870 (466 GiB, not rotational)", "a loop device over XFS on …", "an unknown device"."""
    found = devices(host)
    if not found:
        return "an unknown device"
    top, lowest = found[0], found[-1]
    rotational = lowest.get("rotational")
    turning = "" if rotational is None else ", rotational" if rotational else ", not rotational"
    name = lowest.get("model") or lowest.get("name") or "unknown device"
    size = f"{format_size(int(lowest['size_bytes']))}" if lowest.get("size_bytes") else "size unknown"
    words = f"{name} ({size}{turning})"
    if top.get("kind") != "loop":
        return words
    over = (top.get("loop") or {}).get("file_system")
    held = f" over {over}" if over else ""
    return f"a loop device{held} on {words}" if len(found) > 1 else f"a loop device{held}"


def machine_words(host: Host) -> str:
    """Return "kernel 6.12, Example CPU (2 usable), in a virtual machine (kvm)"."""
    cpu = host.get("cpu") or {}
    words = [f"kernel {host.get('kernel', 'unknown')}"]
    if cpu.get("model"):
        usable = cpu.get("usable")
        words.append(f"{cpu['model']}{f' ({usable} usable)' if usable else ''}")
    if host.get("memory_bytes"):
        words.append(f"{format_size(int(host['memory_bytes']))} of memory")
    if is_virtual(host):
        virtual = host["virtualisation"]
        words.append(f"in a virtual machine ({virtual.get('vm') if isinstance(virtual, dict) else virtual})")
    return ", ".join(words)


def facts(host: Host) -> list[dict[str, str]]:
    """Return all facts as lines for a table: "device, model" and its value."""
    return [{"name": name, "value": value} for name, value in _flat(host, ())]


def _flat(value: Any, names: tuple[str, ...]) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - whatever JSON holds
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _flat(inner, (*names, str(name).replace("_", " ")))
    elif isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        for number, inner in enumerate(value, 1):
            yield from _flat(inner, names if len(value) == 1 else (*names, str(number)))
    else:
        name = ", ".join(names)
        yield name.removesuffix(" bytes"), _words(value, is_bytes=name.endswith(" bytes"))


def _words(value: Any, *, is_bytes: bool) -> str:  # noqa: ANN401 - the same
    if value is None or value in ({}, [], ""):
        return "unknown" if value is None else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return format_size(value) if is_bytes and isinstance(value, int) else str(value)


def differences(old: Host, new: Host) -> list[str]:
    """Return the differences between two machines in words, without facts that do not affect speed."""
    before, now = dict(_flat(telling(old), ())), dict(_flat(telling(new), ()))
    return [
        f"{name}: {before.get(name, 'not told')} before, {now.get(name, 'not told')} now"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]


def telling(host: Host) -> dict[str, Any]:
    """Return the facts without our own version, which is under comparison, and without those that each boot changes.

    The latter are names that the kernel assigns, the memory that it reserves, the space that a loop device's file takes
    besides its data, whether the device bears our mark, and the way to a steady state.
    """
    found = {name: value for name, value in host.items() if name not in {"host", "packages", "python", "conditioning"}}
    found["device"] = _unnamed(host.get("device") or {})
    if isinstance(host.get("memory_bytes"), int):
        found["memory_bytes"] = nominal_bytes(host["memory_bytes"])
    if isinstance(host.get("target"), dict):
        found["target"] = {name: value for name, value in host["target"].items() if name not in _NOT_SPEED}
    if "packages" in host:
        found["packages"] = {name: value for name, value in host["packages"].items() if name != "snapmgr"}
    return found


def _unnamed(device: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: value for name, value in device.items() if name != "name"}
    if "below" in found:
        found["below"] = [_unnamed(lower) for lower in found["below"]]
    if isinstance(found.get("loop"), dict) and "on" in found["loop"]:
        found["loop"] = {**found["loop"], "on": [_unnamed(lower) for lower in found["loop"]["on"]]}
    return found
