"""Programs that put load on a file system: fio passes, sysbench, blogbench, and a private MariaDB.

Scenarios import any of them; none knows the storage that it runs on.
"""
