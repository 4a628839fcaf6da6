"""The capacity of storage pools: samples, forecasts, alarms, and snapshots that were lost when their space ran out.

Imports `catalog` and what is below it; used by every room that reads or takes snapshots.
"""
