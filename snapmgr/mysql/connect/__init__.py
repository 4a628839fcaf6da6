"""Connects to a server: client, credentials, identity, abilities.

Imports `system`; the other rooms of `mysql` import it.
"""
