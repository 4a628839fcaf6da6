"""What snapmgr does for a job, each a straight line: back up, attach, verify, prune, examine."""
