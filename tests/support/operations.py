"""Operations as a prepare on JuiceFS makes them, of any number: one thread reads, one writes, fsyncs hold both up."""

from __future__ import annotations

import random

from snapmgr.trace.operations import Operations

READER, WRITER, KERNEL = 9445, 9448, 0
BEGAN_US = 1_795_251_359_630_180
_PAGE = 16384
_FILES = {
    1028: "ibdata1",
    1031: "sbtest/sbtest1.ibd",
    1032: "sbtest/sbtest2.ibd",
    1033: "sbtest/sbtest3.ibd",
    1239: "ib_logfile0",
    1240: 'mysql/</script><b>"né".ibd',
}
_NAMES = ["read", "write", "fsync", "getattr", "lookup", "open", "flush", "release"]


def prepare_operations(number: int, seed: int = 7) -> Operations:
    """Return `number` operations: in 50,000 some 24 s, 47 % reads, 47 % writes, 70 fsyncs, a few that failed."""
    dice = random.Random(seed)
    made = Operations(names=list(_NAMES), statuses=["OK", "input/output error"], paths=dict(_FILES))
    inodes = [*_FILES, 1300]  # one that the log tells no name of
    clock = dict.fromkeys((READER, WRITER, KERNEL), BEGAN_US)

    def add(thread: int, name: str, us: int, inode: int, size: int = 0, offset: int = 0, status: int = 0) -> None:
        clock[thread] += dice.randint(2, 90)
        # The kernel does not wait: what it asks for overlaps.
        end = clock[thread] + us
        clock[thread] = end if thread != KERNEL else clock[thread] + us // 4
        row = (end, us, thread, _NAMES.index(name), inode, size, offset, 0 if status else size, status)
        columns = (made.end_us, made.duration_us, made.thread, made.name, made.inode, made.size, made.offset, made.got)
        for column, value in zip((*columns, made.status), row, strict=True):
            column.append(value)

    for inode in inodes:
        add(READER, "lookup", dice.randint(200, 900), 1)
        add(READER, "open", dice.randint(200, 900), inode)
    while len(made) < number:
        turn = len(made)
        inode = dice.choice(inodes)
        offset = dice.randrange(64 << 10) * _PAGE
        if turn % 701 == 0:
            # All wait for an fsync.
            clock[READER] = clock[WRITER] = max(clock[READER], clock[WRITER])
            add(WRITER, "fsync", dice.randint(20_000, 90_000), inode)
        elif turn % 17 == 0:
            clock[KERNEL] = max(clock[KERNEL], clock[READER])
            add(KERNEL, dice.choice(("getattr", "getattr", "flush", "release")), dice.randint(60, 4000), inode)
        elif turn % 2:
            missed = dice.random() < 0.06
            us = dice.randint(9_000, 26_000) if missed else int(dice.lognormvariate(5, 0.5))
            add(READER, "read", us, inode, _PAGE, offset, status=int(dice.random() < 0.0004))
        else:
            add(WRITER, "write", int(dice.lognormvariate(5.6, 0.6)), inode, _PAGE, offset)
    order = sorted(range(len(made)), key=made.end_us.__getitem__)
    for column in ("end_us", "duration_us", "thread", "name", "inode", "size", "offset", "got", "status"):
        values = getattr(made, column)
        setattr(made, column, type(values)(values.typecode, [values[row] for row in order]))
    return made
