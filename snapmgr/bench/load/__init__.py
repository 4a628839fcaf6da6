"""Runs programs that put load on a file system: fio passes, sysbench, blogbench, and a private MariaDB.

Scenarios may import any module here; none of them knows the storage that it runs on.
"""
