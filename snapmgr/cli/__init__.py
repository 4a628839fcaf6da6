"""The command line: one module for each command, imported when it is called; the only room that prints.

Nothing imports it but `snapmgr.__main__` and the console script.
"""

import atexit
import gc

# A start makes tens of thousands of objects, none of which is garbage: with Python's threshold of 700, looking for some
# takes a twentieth of a short command's time. Its last look, at the exit, takes another twelfth.
gc.set_threshold(100_000)
atexit.register(gc.freeze)
