"""Parts of the scenario prepare: its physical backup, the ways to prepare it, and the published ladder.

Only `scenarios.prepare` and measuring scripts import them.
"""
