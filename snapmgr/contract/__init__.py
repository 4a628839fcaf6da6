"""Defines the terms between the core and a storage backend: protocols, optional abilities, records, errors, units.

Imports nothing else of snapmgr. Everything in snapmgr may import it; plugins import `snapmgr.api`.
"""
