"""Computes from samples: ratios with intervals, findings, comparisons, changes between runs, advice. Pure.

Reports, the run (to decide when to stop) and `published` import any of them.
"""
